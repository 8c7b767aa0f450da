"""The format `onnx`: to play, with any ONNX runtime (`export/onnx.py` writes it). Files of others are played, too."""

from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import InputError
from sparring.export import onnx_check
from sparring.export.foreign import ForeignRunner, Tensor, check_game, input_of, output_of
from sparring.export.given import Given
from sparring.games import Dict, Game
from sparring.games.spec import Array
from sparring.networks.plain import Value
from sparring.networks.policy import Policy

__all__ = ["Onnx", "OnnxInt8"]

TYPES = {
    "tensor(float)": "f4",
    "tensor(uint8)": "u1",
    "tensor(int8)": "i1",
    "tensor(int32)": "i4",
    "tensor(int64)": "i8",
}


class Onnx:
    suffix = ".onnx"
    takes = ("value",)

    def render(self, policy: Policy, value: Value | None = None) -> bytes:
        from sparring.export import onnx  # it takes a while to load

        return onnx.render(policy, value)

    def load(self, path: Path, game: Game, *, threads: int = 1) -> "OnnxRunner | ForeignRunner":
        session = _session(data := _checked(path), path, threads)
        declaration = session.get_modelmeta().custom_metadata_map.get("sparring.game")
        if declaration is None:
            return _foreign(session, game, path)
        check_game(declaration, game, path)
        names = [value.name for value in session.get_outputs()]
        if "action" not in names:
            raise InputError(f"{path} has no output `action`, but {', '.join(names)}")
        return OnnxRunner(_session(greedy(data), path, threads), game)


class OnnxInt8(Onnx):
    """Its inputs and outputs are those of `onnx`."""

    suffix = ".int8.onnx"
    takes = ("given",)
    calibrated = True

    def render(self, policy: Policy, given: Given) -> bytes:  # type: ignore[override]
        from sparring.export import onnx_whole

        return onnx_whole.render(policy, given)


GREEDY = ("action", "outputs", "value")


def greedy(data: bytes) -> bytes:
    """One of our files without what is for exploring: a session computes all of a graph, whatever it is asked for, and
    that is a sixth of the time of a small network."""
    import onnx

    graph = (model := onnx.load_from_string(data)).graph
    needed = {value.name for value in graph.output} & {*GREEDY}
    for node in reversed(graph.node):  # each comes after what it takes
        if needed & {*node.output}:
            needed |= {*node.input}
    for values in (graph.output, graph.input, graph.initializer):
        for value in [value for value in values if value.name not in needed]:
            values.remove(value)
    for node in [node for node in graph.node if not needed & {*node.output}]:
        graph.node.remove(node)
    return model.SerializeToString()


class OnnxRunner:
    """`threads` is a session's: one for a network this small."""

    def __init__(self, session: Any, game: Game) -> None:
        names = [value.name for value in session.get_outputs()]
        self._names = [name for name in GREEDY if name in names]
        self._run, self._space = session.run, game.observation

    def prepare(self, obs: Array) -> dict[str, Array]:
        if isinstance(self._space, Dict):
            return {f"obs.{name}": np.ascontiguousarray(obs[name]) for name in self._space.fields}
        return {"obs": np.ascontiguousarray(obs)}

    def run(self, ready: dict[str, Array]) -> list[Array]:
        return self._run(self._names, ready)

    def action(self, found: list[Array]) -> Array:
        return found[0]

    def outputs(self, found: list[Array]) -> Array | None:
        return found[self._names.index("outputs")] if "outputs" in self._names else None

    def value(self, found: list[Array]) -> float | None:
        return float(found[self._names.index("value")][0]) if "value" in self._names else None


def _checked(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        onnx_check.check(data)  # light: ours
    except InputError:
        from sparring.export import onnx_foreign

        onnx_foreign.check(data, path)
    return data


def _session(data: bytes, path: Path, threads: int) -> Any:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds: list[type[Exception]] = [
        kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    broken: tuple[type[Exception], ...] = (*kinds, RuntimeError, ValueError)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except broken as error:
        raise InputError(f"ONNX Runtime cannot load {path}: {error}") from error


def _foreign(session: Any, game: Game, path: Path) -> ForeignRunner:
    inputs, outputs = (
        [_tensor(value, path) for value in each] for each in (session.get_inputs(), session.get_outputs())
    )
    into = input_of(inputs, game, path)
    i, act = output_of(outputs, game, path)
    run, names, name = session.run, [outputs[i].name], inputs[0].name
    return ForeignRunner(into, lambda x: run(names, {name: x})[0], act)


def _tensor(value: Any, path: Path) -> Tensor:
    if value.type not in TYPES:
        raise InputError(f"{path} has {value.name} of type {value.type}: {', '.join(TYPES)} are what we give and take")
    shape = tuple(n if isinstance(n, int) else None for n in value.shape)
    return Tensor(value.name, shape, np.dtype(TYPES[value.type]))
