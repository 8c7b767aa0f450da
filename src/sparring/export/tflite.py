"""A tape as a TFLite file: the flatbuffer is written by its schema, which comes with LiteRT. In floats it is the whole
policy, up to the action; in whole numbers (`whole_numbers.py`) it ends where the Edge TPU does, at the head's numbers.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.export.tape import Op, Tape, build
from sparring.export.whole_numbers import Rounded, Whole
from sparring.games import Box, Discrete
from sparring.games.spec import Array
from sparring.networks.plain import Plain
from sparring.networks.spec import choices, scaling

__all__ = ["EDGE_TPU", "MISSING", "carry_about", "render", "render_whole", "schema"]

MISSING = "TFLite files need LiteRT: pip install 'sparring[edge]'"
# What Google's compiler for the Edge TPU takes (coral.ai/docs/edgetpu/models-intro), of what we write.
EDGE_TPU = ("CONV_2D", "FULLY_CONNECTED", "LOGISTIC", "MUL", "PAD", "RELU", "RESHAPE", "RSQRT", "TANH")
# Versions of operators, without and with whole numbers: runtimes refuse a newer one, and misread an older one.
VERSIONS = {
    "ADD": (1, 2), "ARG_MAX": (1, 2), "CAST": (1, 1), "CONV_2D": (1, 3), "FULLY_CONNECTED": (1, 4), "LOGISTIC": (1, 2),
    "MAXIMUM": (1, 2), "MINIMUM": (1, 2), "MUL": (1, 2), "PACK": (1, 2), "PAD": (1, 2),
    "RELU": (1, 2), "RESHAPE": (1, 1), "RSQRT": (1, 2), "SLICE": (1, 2), "TANH": (1, 2),
}  # fmt: skip
NAMES = {
    "dense": "FULLY_CONNECTED", "conv": "CONV_2D", "reshape": "RESHAPE", "relu": "RELU", "tanh": "TANH",
    "sigmoid": "LOGISTIC", "multiply": "MUL", "rsqrt": "RSQRT",
}  # fmt: skip
TYPES = {name: name.upper() for name in ("float32", "int8", "uint8", "int32")}


def schema() -> Any:
    """The flatbuffer's classes.

    :raises InputError: LiteRT is not installed.
    """
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError as error:
        raise InputError(MISSING) from error
    return schema_py_generated


def render(plain: Plain) -> bytes:
    """In floats: `obs` (pixels, or numbers) → `action`, `outputs` and, where there is one, `value`."""
    file = File()
    pixels = plain.image
    x = obs = file.tensor("obs", plain.shape, "uint8" if pixels else "float32")
    if pixels:
        x = file.op("CAST", [x], plain.shape)
    if (plain.scale != 1).any():
        x = file.op("MUL", [x, file.constant(_few(plain.scale))], plain.shape)
    if plain.offset.any():
        x = file.op("ADD", [x, file.constant(plain.offset)], plain.shape)
    if plain.clip is not None:
        x = file.between(x, np.float32(-plain.clip), np.float32(plain.clip), plain.shape)
    tape = build(plain)
    places = _write(file, tape, {0: x})
    outputs = {name: places[i] for name, i in tape.outputs.items()}
    outputs = {"action": _action(file, plain, outputs["outputs"])} | outputs
    return file.finish({"obs": obs}, outputs, {"bound": "action"} | _about(plain))


def render_whole(whole: Whole) -> bytes:
    """In whole numbers: `obs` → `outputs` and, where there is one, `value`, all int8."""
    file, tape = File(), whole.tape
    obs = file.tensor("obs", tape.shapes[0], "int8", whole.forms[0])
    places = _write(file, tape, {0: obs}, whole)
    about = {"bound": whole.bound, "factor": _plain_list(whole.factor), "shift": _plain_list(whole.shift)}
    return file.finish({"obs": obs}, {name: places[i] for name, i in tape.outputs.items()}, about | _about(whole.plain))


def _about(plain: Plain) -> dict[str, Any]:
    return {"game": msgspec.json.encode(plain.game).decode()}


def _few(array: Array) -> Array:
    """One number where all are the same."""
    return array.reshape(-1)[:1] if (array == array.reshape(-1)[0]).all() else array


def _plain_list(array: Array) -> Any:
    return [float(f"{x:.7g}") for x in _few(np.asarray(array, np.float32)).reshape(-1).tolist()]


def _action(file: "File", plain: Plain, out: int) -> int:
    action, size = plain.game.action, plain.outputs
    if isinstance(action, Box):
        s = scaling(action)
        unit = file.op("TANH", [out], (size,)) if plain.bound == "tanh" else out
        if plain.bound == "clip":
            unit = file.between(unit, s.unit_low, s.unit_high, (size,))
        half, centre, low, high = (np.asarray(each, np.float32) for each in (s.half, s.centre, s.low, s.high))
        scaled = file.op("ADD", [file.op("MUL", [unit, file.constant(half)], (size,)), file.constant(centre)], (size,))
        return file.between(scaled, low, high, (size,))
    start, picks = 0, []
    for n in choices(action):
        part = out
        if n != size:
            begin, length = (file.constant(np.array(pair, np.int32)) for pair in ((0, start), (1, n)))
            part = file.op("SLICE", [out, begin, length], (n,))
        picks.append(file.op("ARG_MAX", [part, file.constant(np.array([1], np.int32))], (), "int32"))
        start += n
    if isinstance(action, Discrete):
        first = np.array([action.start], np.int32)
        return file.op("ADD", [picks[0], file.constant(first)], (), "int32") if action.start else picks[0]
    return file.op("PACK", picks, (len(picks),), "int32", values=len(picks), axis=1)


def _write(file: "File", tape: Tape, places: dict[int, int], whole: Whole | None = None) -> dict[int, int]:
    """Each operation; where the tape's tensors are in the file."""
    for i, op in enumerate(tape.ops):
        given = [places[j] for j in op.inputs]
        shape, form = tape.shapes[op.output], whole.forms[op.output] if whole else None
        made = "int8" if whole else "float32"
        if op.w is not None:
            given = [_padded(file, tape, op, given[0], whole), *_constants(file, i, op, whole)]
        elif op.kind == "reshape":
            given.append(file.constant(np.array([1, *shape], np.int32)))
        places[op.output] = file.op(NAMES[op.kind], given, shape, made, form, **_options(tape, op))
    return places


def _options(tape: Tape, op: Op) -> dict[str, Any]:
    if op.kind == "conv":
        same = op.pads == _same(tape.shapes[op.inputs[0]], op)
        return {"relu": op.relu, "stride": op.stride, "same": same and any(map(any, op.pads))}
    return {"relu": op.relu} if op.kind in ("dense", "multiply") else {}


def _same(shape: tuple[int, ...], op: Op) -> tuple[tuple[int, int], ...]:
    """TensorFlow's padding "same"."""
    assert op.w is not None
    total = [max((-(-n // op.stride) - 1) * op.stride + len(op.w) - n, 0) for n in shape[:2]]
    return tuple((n // 2, n - n // 2) for n in total)


def _padded(file: "File", tape: Tape, op: Op, x: int, whole: Whole | None) -> int:
    """Zeros around an image which "same" does not give."""
    shape = tape.shapes[op.inputs[0]]
    if not any(map(any, op.pads)) or op.pads == _same(shape, op):
        return x
    sides = np.array([(0, 0), *op.pads, (0, 0)], np.int32)
    larger = (*(n + sum(pad) for n, pad in zip(shape[:2], op.pads, strict=True)), shape[2])
    form = whole.forms[op.inputs[0]] if whole else None
    return file.op("PAD", [x, file.constant(sides)], larger, "int8" if whole else "float32", form)


def _constants(file: "File", place: int, op: Op, whole: Whole | None) -> list[int]:
    w, b = op.w, op.b
    assert w is not None
    assert b is not None
    order = (1, 0) if op.kind == "dense" else (3, 0, 1, 2)
    if whole is None:
        return [file.constant(w.transpose(order)), file.constant(b)]
    w, b, scale = whole.weights[place]
    scale_in = np.float32(whole.forms[op.inputs[0]].scale)
    return [file.constant(w.transpose(order), scale), file.constant(b, scale_in * scale)]


class File:
    """A TFLite file while it is written. Tensors are known by number."""

    def __init__(self) -> None:
        self.s = schema()
        self.tensors: list[Any] = []
        self.ops: list[Any] = []
        self.codes: dict[tuple[str, int], int] = {}
        self.buffers: list[Any] = [self.s.BufferT()]  # the first is everybody's who has none

    def tensor(
        self, name: str, shape: Sequence[int], kind: str = "float32", form: Rounded | None = None, batch: bool = True
    ) -> int:
        made = self.s.TensorT()
        made.name, made.shape = name, [1, *shape] if batch else list(shape)
        made.type, made.buffer = getattr(self.s.TensorType, TYPES[kind]), 0
        if form is not None:
            made.quantization = self._quantization([form.scale], [form.zero])
        self.tensors.append(made)
        return len(self.tensors) - 1

    def constant(self, array: Array, scale: Array | None = None) -> int:
        array = np.ascontiguousarray(array)
        number = self.tensor("", array.shape, str(array.dtype), batch=False)
        if scale is not None:
            self.tensors[number].quantization = self._quantization(scale.tolist(), [0] * len(scale))
        buffer = self.s.BufferT()
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        self.buffers.append(buffer)
        self.tensors[number].buffer = len(self.buffers) - 1
        return number

    def _quantization(self, scale: list[float], zero: list[int]) -> Any:
        made = self.s.QuantizationParametersT()
        made.scale, made.zeroPoint, made.quantizedDimension = scale, zero, 0
        return made

    def between(self, x: int, low: Any, high: Any, shape: Sequence[int]) -> int:
        for name, bound in (("MAXIMUM", low), ("MINIMUM", high)):
            bound = np.atleast_1d(np.asarray(bound, np.float32))
            if np.isfinite(bound).any():
                x = self.op(name, [x, self.constant(np.nan_to_num(bound, posinf=3.4e38, neginf=-3.4e38))], shape)
        return x

    def op(
        self, name: str, inputs: list[int], shape: Sequence[int], kind: str = "float32", form: Rounded | None = None,
        **options: Any,
    ) -> int:  # fmt: skip
        made, s = self.s.OperatorT(), self.s
        version = VERSIONS[name][kind == "int8"]
        made.opcodeIndex = self.codes.setdefault((name, version), len(self.codes))
        out = self.tensor("", shape, kind, form)
        made.inputs, made.outputs = inputs, [out]
        label = OPTIONS.get(name)
        if label is not None:
            made.builtinOptionsType = getattr(s.BuiltinOptions, label)
            made.builtinOptions = getattr(s, f"{label}T")()
            self._set(made.builtinOptions, name, options)
        self.ops.append(made)
        return out

    def _set(self, made: Any, name: str, options: dict[str, Any]) -> None:
        s = self.s
        if name == "CONV_2D":
            made.strideH = made.strideW = options["stride"]
            made.dilationHFactor = made.dilationWFactor = 1
            made.padding = s.Padding.SAME if options["same"] else s.Padding.VALID
        if options.get("relu"):
            made.fusedActivationFunction = s.ActivationFunctionType.RELU
        if name == "PACK":
            made.valuesCount, made.axis = options["values"], options["axis"]
        if name == "ARG_MAX":
            made.outputType = s.TensorType.INT32
        if name == "CAST":
            made.inDataType, made.outDataType = s.TensorType.UINT8, s.TensorType.FLOAT32

    def finish(self, inputs: dict[str, int], outputs: dict[str, int], about: dict[str, Any]) -> bytes:
        import flatbuffers

        s = self.s
        graph, model = s.SubGraphT(), s.ModelT()
        for name, number in (*inputs.items(), *outputs.items()):
            self.tensors[number].name = name
        graph.tensors, graph.operators, graph.name = self.tensors, self.ops, ""
        graph.inputs, graph.outputs = list(inputs.values()), list(outputs.values())
        for (name, version), _ in sorted(self.codes.items(), key=lambda item: item[1]):
            code = s.OperatorCodeT()
            code.builtinCode = getattr(s.BuiltinOperator, name)
            code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), version
            model.operatorCodes = [*(model.operatorCodes or []), code]
        buffer, note = s.BufferT(), s.MetadataT()
        buffer.data = np.frombuffer(json.dumps(about, separators=(",", ":")).encode(), np.uint8)
        self.buffers.append(buffer)
        note.name, note.buffer = "sparring", len(self.buffers) - 1
        model.version, model.subgraphs, model.buffers, model.metadata = 3, [graph], self.buffers, [note]
        model.description = "sparring"
        builder = flatbuffers.Builder(1 << 16)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def carry_about(source: bytes, made: bytes) -> bytes:
    """What our file says of itself, in the file that another program made of it: the Edge TPU's compiler drops it.

    :param source: Our file.
    :param made: The other program's.
    """
    import flatbuffers

    s = schema()
    ours, theirs = (s.ModelT.InitFromObj(s.Model.GetRootAs(data, 0)) for data in (source, made))
    (note,) = [note for note in ours.metadata if note.name == b"sparring"]
    if any(each.name == note.name for each in theirs.metadata or []):
        return made
    theirs.buffers.append(ours.buffers[note.buffer])
    note.buffer = len(theirs.buffers) - 1
    theirs.metadata = [*(theirs.metadata or []), note]
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(theirs.Pack(builder), b"TFL3")
    return bytes(builder.Output())


OPTIONS = {
    "ADD": "AddOptions", "ARG_MAX": "ArgMaxOptions", "CAST": "CastOptions", "CONV_2D": "Conv2DOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions", "MAXIMUM": "MaximumMinimumOptions",
    "MINIMUM": "MaximumMinimumOptions", "MUL": "MulOptions", "PACK": "PackOptions", "PAD": "PadOptions",
    "RESHAPE": "ReshapeOptions", "SLICE": "SliceOptions",
}  # fmt: skip
