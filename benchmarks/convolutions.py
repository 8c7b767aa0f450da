"""Training samples a second of a network of convolutions, ours (inside a scan, as PPO learns) beside PyTorch's with
channels last (NHWC): uint8 images in, a gradient step of plain descent out. Rounds are interleaved; processor time
counts, on one thread, so that other work on the machine does not.

    python benchmarks/convolutions.py --network nature --rounds 5
"""

import os

os.environ.setdefault("NPROC", "1")  # read when XLA and OpenMP begin

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from sparring.games import Box
from sparring.networks.functions import init_params, mean_gradients, torso
from sparring.networks.spec import Conv, Dense, Layer, torso_shapes

BATCH, STEPS, LR = 256, 3, 1e-3
NETWORKS: dict[str, tuple[int, tuple[Layer, ...]]] = {
    "nature": (84, (Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3), Dense(512))),
    "fast": (42, (Conv(16, 6, 3), Conv(32, 4, 2), Dense(256))),
    "model1": (84, (Conv(16, 8, 4, padding="same"), Conv(32, 4, 2, padding="same"), Conv(256, 11))),
}
Run = Callable[[], Any]


def ours(layers: tuple[Layer, ...], images: np.ndarray) -> Run:
    shapes, _ = torso_shapes(Box(images.shape[2:], "uint8"), layers)
    params = init_params(jax.random.key(0), shapes)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        return jnp.square(torso(layers, params, x)).mean(), {}

    @jax.jit
    def run(params: Any, images: jax.Array) -> Any:
        def step(params: Any, x: jax.Array) -> tuple[Any, None]:
            grads, _ = mean_gradients(loss, params, x, images=True)
            return jax.tree.map(lambda p, g: p - LR * g, params, grads), None

        return jax.lax.scan(step, params, images)[0]

    return lambda: jax.block_until_ready(run(params, images))


def theirs(layers: tuple[Layer, ...], images: np.ndarray) -> Run:
    parts: list[Any] = []
    channels, side, flat = images.shape[-1], images.shape[2], False
    for layer in layers:
        if isinstance(layer, Conv):
            before, after = layer.pads(side)
            parts.append(torch.nn.ZeroPad2d((before, after, before, after)) if before or after else torch.nn.Identity())
            parts.append(torch.nn.Conv2d(channels, layer.filters, layer.kernel, layer.stride))
            side, _, channels = layer.output((side, side, channels))
        else:
            assert isinstance(layer, Dense)
            parts += [] if flat else [torch.nn.Flatten()]
            parts.append(torch.nn.Linear(channels if flat else channels * side * side, layer.units))
            channels, flat = layer.units, True
        parts.append(torch.nn.ReLU())
    net = torch.nn.Sequential(*parts).to(memory_format=torch.channels_last)
    optimiser, batches = torch.optim.SGD(net.parameters(), LR), torch.from_numpy(images)

    def run() -> None:
        for x in batches:
            optimiser.zero_grad()
            net(x.permute(0, 3, 1, 2).float() * (1 / 255)).square().mean().backward()
            optimiser.step()

    return run


def rate(run: Run) -> float:
    began = time.process_time()
    run()
    return BATCH * STEPS / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=NETWORKS, default="nature")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["NPROC"]))
    pixels, layers = NETWORKS[args.network]
    images = np.random.default_rng(0).integers(0, 256, (STEPS, BATCH, pixels, pixels, 4)).astype(np.uint8)
    runs = ours(layers, images), theirs(layers, images)
    for run in runs:
        run()  # compiles
    ratios = []
    for _ in range(args.rounds):
        own, other = (rate(run) for run in runs)
        ratios.append(own / other)
        print(f"ours {own:6.0f}/s   PyTorch {other:6.0f}/s   ratio {ratios[-1]:.2f}", flush=True)
    print(f"{args.network}: median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
