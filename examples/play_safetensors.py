"""A policy's .safetensors file, evaluated without Sparring: NumPy and the safetensors package, greedy actions.

The file has arrays (`torso.0.w`, `head.b`, …) and, in its metadata, one JSON text, `sparring`: the game's spaces, the
list of layers and the head. That is all there is to a policy; this program is the whole of its arithmetic.

    policy = Evaluator("CartPole-v1-ppo-1.safetensors")
    action = policy.act(obs)  # one observation; of a Dict space a mapping
"""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

Array = np.ndarray[Any, np.dtype[Any]]


class Evaluator:
    def __init__(self, path: str | Path) -> None:
        data = Path(path).read_bytes()
        (size,) = struct.unpack_from("<Q", data)  # the header's length, then the header
        self.spec = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["sparring"])
        self.arrays = load(data)

    def act(self, obs: Any) -> Any:
        game, head, out = self.spec["game"], self.spec["head"]["head"], self.outputs(obs)
        action = game["action"]
        if action["type"] == "discrete":
            return int(out.argmax()) + action.get("start", 0)
        if action["type"] == "multi_discrete":
            parts = np.split(out, np.cumsum(action["nvec"])[:-1])
            return [int(part.argmax()) for part in parts]
        count = math.prod(action["shape"])
        return box_action(action, np.tanh(out[:count]) if head in ("squashed", "deterministic") else out[:count])

    def outputs(self, obs: Any) -> Array:
        """Q-values, logits, or means (and log-deviations) of actions in ±1."""
        a = self.arrays
        x = features(self.spec["game"]["observation"], obs)
        if "normaliser.mean" in a:
            x = np.clip((x - a["normaliser.mean"]) / a["normaliser.std"], -10, 10)
        for i, layer in enumerate(self.spec["layers"]):
            w, b = a[f"torso.{i}.w"], a[f"torso.{i}.b"]
            if layer["layer"] == "conv":
                x = convolve(x, w, layer.get("stride", 1), layer.get("padding", "valid")) + b
            elif layer["layer"] == "dense":
                x = x.reshape(-1) @ w + b  # images are flattened by rows, columns, channels
                if layer.get("norm", False):
                    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
            else:
                raise ValueError(f"layer {layer['layer']!r} is not one of Sparring's own")
            x = ACTIVATIONS[layer.get("activation", "relu")](x)
        x = x.reshape(-1)
        out = x @ a["head.w"] + a["head.b"]
        if "head.value.w" in a:  # duelling
            action = self.spec["game"]["action"]
            sizes = action["nvec"] if action["type"] == "multi_discrete" else [action["n"]]
            parts = np.split(out, np.cumsum(sizes)[:-1])
            value = x @ a["head.value.w"] + a["head.value.b"]
            out = np.concatenate([part - part.mean() for part in parts]) + value
        return np.asarray(out)


ACTIVATIONS: dict[str, Any] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "linear": lambda x: x,
}


def features(space: dict[str, Any], obs: Any) -> Array:
    """What the first layer sees: an image (rows, columns, channels), or numbers; choices as 0 and 1."""
    if space["type"] == "dict":
        return np.concatenate(
            [features(space["fields"][name], obs[name]).reshape(-1) for name in sorted(space["fields"])]
        )
    if space["type"] == "discrete":
        return (np.arange(space["n"]) + space.get("start", 0) == int(obs)).astype(np.float32)
    if space["type"] == "multi_discrete":
        picks = np.reshape(obs, -1)
        return np.concatenate([np.float32(np.arange(n) == pick) for n, pick in zip(space["nvec"], picks, strict=True)])
    array = np.asarray(obs)
    if space.get("dtype", "float32") == "uint8" and len(space["shape"]) == 3:
        channels_first = space["shape"][0] < space["shape"][2]
        pixels = array.transpose(1, 2, 0) if channels_first else array
        return pixels.astype(np.float32) / np.float32(255)
    return array.astype(np.float32).reshape(-1)


def convolve(x: Array, w: Array, stride: int, padding: str) -> Array:
    """`w` is (kernel, kernel, in, out). "same" adds zeros as TensorFlow does: the larger half below and right."""
    kernel = len(w)
    if padding == "same":
        missing = [max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in x.shape[:2]]
        x = np.pad(x, [*((n // 2, n - n // 2) for n in missing), (0, 0)])
    rows, columns = ((side - kernel) // stride + 1 for side in x.shape[:2])
    out = np.empty((rows, columns, w.shape[-1]), np.float32)
    for i in range(rows):
        for j in range(columns):
            window = x[i * stride : i * stride + kernel, j * stride : j * stride + kernel]
            out[i, j] = np.tensordot(window, w, 3)
    return out


def box_action(space: dict[str, Any], unit: Array) -> Array:
    """A dimension with both bounds is scaled from ±1; any other keeps its number and the bound that it has."""
    low, high = (
        np.broadcast_to(np.reshape(none if space.get(name) is None else space[name], -1), unit.shape).astype(float)
        for name, none in (("low", -np.inf), ("high", np.inf))
    )
    low, high = np.where(low < -3e38, -np.inf, low), np.where(high > 3e38, np.inf, high)  # further out means none
    both = np.isfinite(low) & np.isfinite(high)
    a, b = np.where(both, low, -1), np.where(both, high, 1)
    scaled = (a + b) / 2 + (b - a) / 2 * np.where(both, np.clip(unit, -1, 1), unit)
    return np.clip(scaled, low, high).reshape(space["shape"]).astype(space.get("dtype", "float32"))


if __name__ == "__main__":
    policy = Evaluator(sys.argv[1])
    shape = policy.spec["game"]["observation"].get("shape", ())
    print(policy.act(np.zeros(shape)) if shape else json.dumps(policy.spec["layers"]))
