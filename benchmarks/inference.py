"""What one action costs, on one core: the files of every format through their runners, with and without the value's
tower, beside a bare ONNX session, PyTorch eager with the same weights, and NumPy. How long each export took (CPU
seconds: others may use the core), and the targets that all of it is measured by.

Rounds alternate; every figure is the median of all rounds' medians, and ratios are of the same round. Each plays
observations of its space, one at a time. PyTorch gets what people write: modules, `no_grad`, argmax. Weights are
random: so are the actions of whole numbers, whose export then tunes them as long as it ever does.

`taskset -c 0 python benchmarks/inference.py [--rounds 9] [--steps 300] [--only "model 1"]`
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from sparring import algorithms
from sparring.bench import study
from sparring.bench.timed_play import Timed
from sparring.experiment import read
from sparring.export import formats
from sparring.export.formats import Given
from sparring.export.safetensors_file import PolicyRunner
from sparring.games import Box, Discrete, Game
from sparring.games.spec import Array
from sparring.networks.layers import Layer
from sparring.networks.plain import Plain, Value
from sparring.networks.plain_steps import Activate, Affine, Convolve
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, param_shapes

ROOT = Path(__file__).parents[1]
FORMATS = ("onnx", "onnx-int8", "tflite", "tflite-int8", "c", "c-int8")
INT8 = tuple(name for name in FORMATS if name.endswith("int8"))
CALIBRATION = 100  # observations
LONGEST = 1.5  # seconds of a way in a round, however slow it is
EXPORT_S = 30.0
FUNCTIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh, "silu": torch.nn.SiLU}
Act = Callable[[Array], object]


@dataclass
class Ways:
    """To play one policy, by name. Those with the value's tower are called `FORMAT + value`."""

    acts: dict[str, Act]
    export_s: dict[str, float] = field(default_factory=dict)
    megabytes: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)  # µs, the median of each

    def us(self, way: str) -> float:
        return statistics.median(self.rounds[way])

    def ratio(self, way: str, other: str) -> float:
        """The median of each round's."""
        return statistics.median(np.array(self.rounds[way]) / self.rounds[other])


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
    return Policy(game, layers, Categorical(), random_params(param_shapes(game, layers, Categorical()), 0))


def random_params(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(rng.standard_normal(shape) / np.sqrt(max(np.prod(shape[:-1]), 1)))
        for name, shape in shapes.items()
    }


def random_value(policy: Policy) -> Value:
    """A tower of its own, of the policy's shape, as the study had it."""
    shapes = param_shapes(policy.game, policy.layers, Categorical())
    width = shapes["head.w"][0]
    shapes = {name: shape for name, shape in shapes.items() if name.startswith("torso.")}
    return Value(policy.layers, random_params(shapes | {"head.w": (width, 1), "head.b": (1,)}, 1))


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


def ways_of(policy: Policy) -> Ways:
    calibration = np.concatenate(observe(policy, CALIBRATION, seed=2))
    ways = Ways({"PyTorch eager": in_torch(policy), "NumPy": Timed(PolicyRunner(policy)).act})
    for value, end in ((None, ""), (random_value(policy), " + value")):
        given = Given(value, calibration)
        for name in FORMATS:
            with tempfile.TemporaryDirectory() as folder:
                began = time.process_time()
                files = formats.render(name, policy, "policy", given)
                ways.export_s[name + end] = time.process_time() - began
                (path,) = formats.write(files, Path(folder))
                ways.megabytes[name + end] = path.stat().st_size / 1e6
                ways.acts[name + end] = Timed(formats.load(path, policy.game, name)).act
                if name + end == "onnx":
                    ways.acts["bare session"] = in_session(path)
    return ways


def median_us(act: Act, observations: list[Array]) -> float:
    times = []
    last = time.perf_counter() + LONGEST
    for obs in observations:
        began = time.perf_counter()
        act(obs)
        done = time.perf_counter()
        times.append(done - began)
        if done > last:
            break
    return statistics.median(times) * 1e6


def observe(policy: Policy, count: int, seed: int = 1) -> list[Array]:
    rng, space = np.random.default_rng(seed), policy.game.observation
    assert isinstance(space, Box)
    if space.is_image:
        rows = rng.integers(0, 256, (count, *space.shape)).astype(np.uint8)
    else:
        rows = rng.standard_normal((count, *space.shape)).astype(np.float32)
    return [row[None] for row in rows]


def measure(policy: Policy, rounds: int, steps: int) -> Ways:
    ways, seen = ways_of(policy), observe(policy, steps)
    exact = [way for way in ways.acts if not way.startswith(INT8)]
    for obs in seen[:20]:
        chosen = {way: int(np.asarray(ways.acts[way](obs)).ravel()[0]) for way in exact}
        assert len(set(chosen.values())) == 1, chosen  # the same network, or the figures mean nothing
    for way, act in ways.acts.items():
        median_us(act, seen[:20])
        ways.rounds[way] = []
    for _ in range(rounds):
        for way, act in ways.acts.items():
            ways.rounds[way].append(median_us(act, seen))
    return ways


def show(name: str, ways: Ways) -> None:
    for way in [each for each in ways.acts if not each.endswith("value")]:
        towered = f"{way} + value"
        cells = [name, way, f"{ways.us(way):.1f}", f"×{ways.ratio('onnx', way):.2f}"]
        if way in FORMATS:
            cells += [f"{ways.us(towered):.1f}", f"×{ways.ratio(way, towered):.2f}"]
            cells += [f"{ways.export_s[way]:.1f}", f"{ways.export_s[towered]:.1f}", f"{ways.megabytes[way]:.2f}"]
        else:
            cells += ["–"] * 5
        print("| " + " | ".join(cells) + " |", flush=True)


def targets(found: dict[str, Ways]) -> list[tuple[str, str, float, float]]:
    """What is asked, of which network, at most how much, and what was found."""
    rows: list[tuple[str, str, float, float]] = []
    for name, ways in found.items():
        rows.append(("ONNX beside PyTorch eager", name, 0.5, ways.ratio("onnx", "PyTorch eager")))
        rows.append(("ONNX beside a bare session", name, 1.1, ways.ratio("onnx", "bare session")))
        if name.startswith("64-64"):
            rows.append(("C beside ONNX", name, 2.0, ways.ratio("c", "onnx")))
        if name.startswith("model"):
            coral = dict(zip(study.MODELS, study.INFERENCE["TFLite int8 on Coral"], strict=True))
            half = coral[int(name.split()[1].rstrip(","))] / 2
            for end in ("", " + value"):
                best = min(INT8, key=lambda way: ways.us(way + end))
                rows.append((f"ms of int8{end} ({best}), half of Coral's", name, half, ways.us(best + end) / 1e3))
            for way in FORMATS:
                rows.append(
                    (f"{way} without the value's tower, of with it", name, 0.6, ways.ratio(way, way + " + value"))
                )
        slowest = max(ways.export_s, key=lambda way: ways.export_s[way])
        rows.append((f"seconds of an export (the longest: {slowest})", name, EXPORT_S, ways.export_s[slowest]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="networks whose name begins so")
    o = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    heads = ("network", "by", "µs", "ONNX / it", "with value, µs", "without / with", "export s", "with value", "MB")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    found: dict[str, Ways] = {}
    for name, policy in policies().items():
        if name.startswith(o.only):
            found[name] = measure(policy, o.rounds, o.steps)
            show(name, found[name])
    print("\n| target | network | at most | found | |\n|---|---|---|---|---|")
    for what, name, most, got in targets(found):
        print(f"| {what} | {name} | {most:.3g} | {got:.3g} | {'met' if got <= most else '**missed**'} |")


if __name__ == "__main__":
    main()
