"""What one action costs, on one core: our ONNX file through its runner, a bare session of the same file, PyTorch eager
with the same weights, NumPy. The targets: ≤ 0.5 × PyTorch, ≤ 1.1 × the bare session.

Rounds alternate; every figure is the median of all rounds' medians, and ratios are of the same run. Each
plays observations of its space, one at a time. PyTorch gets what people write: modules, `no_grad`, argmax.

`taskset -c 0 python benchmarks/inference.py [--rounds 9] [--steps 300]`
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from sparring import algorithms
from sparring.bench.timed_play import Timed
from sparring.experiment import read
from sparring.export import formats
from sparring.export.safetensors_file import PolicyRunner
from sparring.games import Box, Discrete, Game
from sparring.games.spec import Array
from sparring.networks.layers import Layer
from sparring.networks.plain import Plain
from sparring.networks.plain_steps import Activate, Affine, Convolve
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, param_shapes

ROOT = Path(__file__).parents[1]
FUNCTIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh, "silu": torch.nn.SiLU}
Act = Callable[[Array], object]


def policies() -> dict[str, Policy]:
    found = {
        "64-64, 4 floats": random_policy(Game("a", Box((4,)), Discrete(2)), (Dense(64, "tanh"), Dense(64, "tanh"))),
        "512-512, 44 floats": random_policy(Game("b", Box((44,)), Discrete(6)), (Dense(512), Dense(512))),
    }
    for model in (1, 3, 4):
        experiment = read(ROOT / f"experiments/pong/model{model}.yaml")
        size = experiment.to_builtins()["game"]["pixels"]
        game = Game("p", Box((size, size, 4), "uint8"), Discrete(6))
        layers = algorithms.create("ppo", game, experiment.hyperparameters).layers
        assert layers is not None
        found[f"model {model}, {size} pixels"] = random_policy(game, layers)
    return found


def random_policy(game: Game, layers: tuple[Layer, ...]) -> Policy:
    rng = np.random.default_rng(0)
    shapes = param_shapes(game, layers, Categorical())
    params = {
        name: np.float32(rng.standard_normal(shape) / np.sqrt(max(np.prod(shape[:-1]), 1)))
        for name, shape in shapes.items()
    }
    return Policy(game, layers, Categorical(), params)


class Flat(torch.nn.Module):
    """In our order of numbers: rows, columns, channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(1) if x.ndim == 4 else x


def module(plain: Plain) -> torch.nn.Sequential:
    parts: list[torch.nn.Module] = []
    for step in (*plain.steps, plain.head):
        match step:
            case Affine(w, b):
                layer = torch.nn.Linear(*w.shape)
                layer.weight.data, layer.bias.data = torch.from_numpy(w.T.copy()), torch.from_numpy(b.copy())
                parts += [Flat(), layer]
            case Convolve(w, b, stride, pads):
                (top, bottom), (left, right) = pads
                if any((top, bottom, left, right)):
                    parts.append(torch.nn.ZeroPad2d((left, right, top, bottom)))
                conv = torch.nn.Conv2d(w.shape[2], w.shape[3], w.shape[:2], stride)
                conv.weight.data = torch.from_numpy(w.transpose(3, 2, 0, 1).copy())
                conv.bias.data = torch.from_numpy(b.copy())
                parts.append(conv)
            case Activate(function):
                parts.append(FUNCTIONS[function]())
    return torch.nn.Sequential(*parts).eval()


def in_torch(policy: Policy) -> Act:
    plain = Plain.of(policy)
    net, image = module(plain), plain.image

    def act(obs: Array) -> int:
        with torch.no_grad():
            x = torch.from_numpy(obs).float()
            return int(net(x.permute(0, 3, 1, 2) / 255 if image else x).argmax())

    return act


def in_session(path: Path) -> Act:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda obs: session.run(["action"], {"obs": obs})[0]


def median_us(act: Act, observations: list[Array]) -> float:
    times = []
    for obs in observations:
        began = time.perf_counter()
        act(obs)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def observe(policy: Policy, count: int) -> list[Array]:
    rng, space = np.random.default_rng(1), policy.game.observation
    assert isinstance(space, Box)
    if space.is_image:
        rows = rng.integers(0, 256, (count, *space.shape)).astype(np.uint8)
    else:
        rows = rng.standard_normal((count, *space.shape)).astype(np.float32)
    return [row[None] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    o = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print("| network | ONNX µs | bare session | PyTorch eager | NumPy | ONNX / bare | ONNX / PyTorch |")
    print("|---|---|---|---|---|---|---|")
    for name, policy in policies().items():
        with tempfile.TemporaryDirectory() as folder:
            (path,) = formats.write(formats.render("onnx", policy, "policy"), Path(folder))
            ways: dict[str, Act] = {
                "onnx": Timed(formats.load(path, policy.game)).act,
                "bare": in_session(path),
                "torch": in_torch(policy),
                "numpy": Timed(PolicyRunner(policy)).act,
            }
        seen = observe(policy, o.steps)
        for obs in seen[:20]:
            chosen = {way: int(np.asarray(act(obs)).ravel()[0]) for way, act in ways.items()}
            assert len(set(chosen.values())) == 1, chosen  # the same network, or the figures mean nothing
        rounds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(o.rounds):
            for way, act in ways.items():
                rounds[way].append(median_us(act, seen))
        us = {way: statistics.median(each) for way, each in rounds.items()}
        bare, eager = (statistics.median(np.array(rounds["onnx"]) / rounds[way]) for way in ("bare", "torch"))
        figures = " | ".join(f"{us[way]:.1f}" for way in ways)
        print(f"| {name} | {figures} | ×{bare:.2f} | ×{eager:.2f} |", flush=True)


if __name__ == "__main__":
    main()
