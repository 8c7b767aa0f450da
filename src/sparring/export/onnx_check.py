"""What a downloaded ONNX file may contain before ONNX Runtime sees it: the operators of our policies and nothing else.
No files beside it, no functions, no foreign domains, no graphs within nodes.

Ours because a game ships it: `onnx` is 27 MB, and its checker asks whether a file is valid, not whether it is
harmless. It reads protobuf itself, knows the fields that our policies have and refuses every other one. It does not
bound how much a graph of allowed operators computes.
"""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from sparring.errors import InputError
from sparring.export.protobuf import BYTES, FOUR_BYTES, NUMBER, field
from sparring.games.spec import MAX_DIMENSIONS

__all__ = ["OPERATORS", "check", "require_noise"]

MAX_BYTES = 256 << 20
MAX_FIELDS = 500_000  # in all: a policy with a hundred action parts has some 10,000
MAX_RANK = MAX_DIMENSIONS + 1  # a batch of what a game may declare
MAX_NUMBER = 1 << 24  # of an axis, a kernel, a stride …
MAX_PAD = 1 << 10  # rows or columns of zeros beside an image
IR_VERSIONS, OPSETS = range(4, 15), range(13, 27)

# What `export.onnx` writes, with the attributes it gives; in whole numbers (`onnx_whole`) also Quantize- and
# DequantizeLinear.
OPERATORS: dict[str, tuple[str, ...]] = {
    "Add": (),
    "ArgMax": ("axis", "keepdims"),
    "Cast": ("to",),
    "Clip": (),
    "Concat": ("axis",),
    "Conv": ("kernel_shape", "pads", "strides"),
    "DequantizeLinear": ("axis",),
    "Div": (),
    "Equal": (),
    "Exp": (),
    "Flatten": ("axis",),
    "Gather": ("axis",),
    "GatherElements": ("axis",),
    "Gemm": (),
    "LayerNormalization": ("epsilon",),
    "Less": (),
    "Log": (),
    "LogSoftmax": ("axis",),
    "Max": (),
    "Min": (),
    "Mul": (),
    "Neg": (),
    "QuantizeLinear": (),
    "ReduceMean": ("axes", "keepdims"),
    "ReduceSum": ("keepdims",),
    "Relu": (),
    "Reshape": (),
    "Sigmoid": (),
    "Softplus": (),
    "Split": ("axis",),
    "Squeeze": (),
    "Sub": (),
    "Tanh": (),
    "Transpose": ("perm",),
    "Unsqueeze": (),
    "Where": (),
}
# Bytes per element, by ONNX's number of the type: float32, uint8, int8, int16, int32, int64, bool, float64.
ELEMENTS = {1: 4, 2: 1, 3: 1, 5: 2, 6: 4, 7: 8, 9: 1, 11: 8}

FLOAT, INT, INTS = 1, 2, 7  # types of attributes
FRACTIONS = {("LayerNormalization", "epsilon")}  # attributes that are a FLOAT; all others are whole numbers


class Known(NamedTuple):
    """A field that our policies have."""

    name: str
    wire: int = BYTES
    many: bool = False


# By the numbers of onnx.proto.
MODEL = {
    1: Known("ir_version", NUMBER),
    2: Known("producer_name"),
    7: Known("graph"),
    8: Known("opset_import", many=True),
    14: Known("metadata_props", many=True),
}
OPSET = {1: Known("domain"), 2: Known("version", NUMBER)}
PROPERTY = {1: Known("key"), 2: Known("value")}
GRAPH = {
    1: Known("node", many=True),
    2: Known("name"),
    5: Known("initializer", many=True),
    11: Known("input", many=True),
    12: Known("output", many=True),
}
NODE = {
    1: Known("input", many=True),
    2: Known("output", many=True),
    3: Known("name"),
    4: Known("op_type"),
    5: Known("attribute", many=True),
    7: Known("domain"),
}
ATTRIBUTE = {
    1: Known("name"),
    2: Known("f", FOUR_BYTES),
    3: Known("i", NUMBER),
    8: Known("ints", NUMBER, many=True),
    20: Known("type", NUMBER),
}
TENSOR = {
    1: Known("dims", NUMBER, many=True),
    2: Known("data_type", NUMBER),
    8: Known("name"),
    9: Known("raw_data"),
}
VALUE = {1: Known("name"), 2: Known("type")}
TYPE = {1: Known("tensor_type")}
TENSOR_TYPE = {1: Known("elem_type", NUMBER), 2: Known("shape")}
SHAPE = {1: Known("dim", many=True)}
DIMENSION = {1: Known("dim_value", NUMBER), 2: Known("dim_param")}

# Names for people of what is refused most likely.
REFUSED = {
    ("model", 20): "training information",
    ("model", 25): "functions of its own",
    ("graph", 15): "sparse tensors",
    ("attribute", 5): "a tensor as attribute",
    ("attribute", 6): "a graph within a node",
    ("attribute", 11): "graphs within a node",
    ("tensor", 13): "external data: a tensor in another file",
    ("tensor", 14): "external data: a tensor in another file",
}


def check(data: bytes) -> None:
    """InputError, saying what was found, unless the file is of the kind that `export.onnx` writes."""
    if len(data) > MAX_BYTES:
        raise InputError(f"not a policy we load: {len(data) >> 20} MiB, at most {MAX_BYTES >> 20} are allowed")
    try:
        Check().model(memoryview(data))
    except UnknownPart as refused:
        raise InputError(f"not a policy we load: {refused}") from refused


def require_noise(data: bytes) -> bytes:
    """A checked policy without the default of its input `noise`, which then has to be given."""
    reader = Check()
    parts = []
    for number, wire, value in reader.fields(memoryview(data)):
        if MODEL[number].name == "graph" and not isinstance(value, int):
            value = memoryview(b"".join(field(*each) for each in reader.fields(value) if not reader.is_noise(*each)))
        parts.append(field(number, wire, value))
    return b"".join(parts)


class UnknownPart(Exception):
    """Why."""


class Message:
    """A message's fields, by name: numbers, or views of bytes."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.numbers: dict[str, list[int]] = {}
        self.views: dict[str, list[memoryview]] = {}

    def number(self, name: str) -> int:
        if name not in self.numbers:
            raise UnknownPart(f"a {self.what} without {name}")
        return self.numbers[name][0]

    def view(self, name: str) -> memoryview:
        if name not in self.views:
            raise UnknownPart(f"a {self.what} without {name}")
        return self.views[name][0]

    def text(self, name: str) -> str:
        """Empty if absent, as protobuf has it."""
        try:
            return bytes(self.views[name][0]).decode() if name in self.views else ""
        except UnicodeDecodeError as error:
            raise UnknownPart(f"{name} of a {self.what} is not text") from error


class Check:
    def __init__(self) -> None:
        self.fields_left = MAX_FIELDS

    def model(self, data: memoryview) -> None:
        model = self._read("model", MODEL, data)
        if model.number("ir_version") not in IR_VERSIONS:
            raise UnknownPart(f"ONNX format {model.number('ir_version')}: update Sparring, or the server")
        for view in model.views.get("opset_import", []):
            opset = self._read("opset", OPSET, view)
            if opset.text("domain") or opset.number("version") not in OPSETS:
                raise UnknownPart(f"operator set {opset.text('domain')[:50]!r} {opset.number('version')}")
        for view in model.views.get("metadata_props", []):
            # ONNX Runtime reads session options from some other keys.
            if not (entry := self._read("property", PROPERTY, view)).text("key").startswith("sparring."):
                raise UnknownPart(f"metadata {entry.text('key')[:50]!r}")
        if "opset_import" not in model.views:
            raise UnknownPart("no operator set")
        self._graph(model.view("graph"))

    def is_noise(self, number: int, wire: int, value: int | memoryview) -> bool:
        """Whether a graph's field is the default of `noise`."""
        if GRAPH[number].name != "initializer" or isinstance(value, int):
            return False
        return self._read("tensor", TENSOR, value).text("name") == "noise"

    def _graph(self, data: memoryview) -> None:
        graph = self._read("graph", GRAPH, data)
        for view in graph.views.get("node", []):
            self._node(view)
        for view in graph.views.get("initializer", []):
            self._tensor(view)
        for view in (*graph.views.get("input", []), *graph.views.get("output", [])):
            self._value(view)

    def _node(self, data: memoryview) -> None:
        node = self._read("node", NODE, data)
        operator, domain = node.text("op_type"), node.text("domain")
        if domain or operator not in OPERATORS:
            raise UnknownPart(f"operator {operator[:50]!r}" + f" of {domain[:50]!r}" * bool(domain))
        for view in node.views.get("attribute", []):
            attribute = self._read("attribute", ATTRIBUTE, view)
            name = attribute.text("name")
            if name not in OPERATORS[operator]:
                raise UnknownPart(f"attribute {name[:50]!r} of {operator}")
            self._attribute(operator, name, attribute)

    def _attribute(self, operator: str, name: str, attribute: Message) -> None:
        fraction = (operator, name) in FRACTIONS
        if attribute.number("type") not in ((FLOAT,) if fraction else (INT, INTS)):
            raise UnknownPart(f"attribute {name} of {operator} has another type than ours")
        values = [*attribute.numbers.get("i", []), *attribute.numbers.get("ints", [])]
        least, most = (0, MAX_PAD) if name == "pads" else (int(operator == "Conv"), MAX_NUMBER)
        sane = 0 < struct.unpack("<f", attribute.view("f"))[0] < 1 if fraction else True
        if not sane or not all(least <= value < most for value in values):
            raise UnknownPart(f"attribute {name} of {operator} out of bounds")

    def _tensor(self, data: memoryview) -> None:
        tensor = self._read("tensor", TENSOR, data)
        dims, kind, raw = tensor.numbers.get("dims", []), tensor.number("data_type"), tensor.view("raw_data")
        if kind not in ELEMENTS or len(dims) > MAX_RANK:
            raise UnknownPart(f"a tensor of type {kind} and {len(dims)} dimensions")
        if len(raw) == 0 or len(raw) != math.prod(dims) * ELEMENTS[kind]:
            raise UnknownPart(f"a tensor of {len(raw)} bytes whose shape is {dims}")

    def _value(self, data: memoryview) -> None:
        value = self._read("value", VALUE, data)
        kind = self._read("type", TYPE, value.view("type"))
        tensor = self._read("tensor type", TENSOR_TYPE, kind.view("tensor_type"))
        if tensor.number("elem_type") not in ELEMENTS:
            raise UnknownPart(f"an input or output of type {tensor.number('elem_type')}")
        shape = self._read("shape", SHAPE, tensor.view("shape")).views.get("dim", [])
        dims = [self._read("dimension", DIMENSION, view) for view in shape]
        if len(dims) > MAX_RANK or any(n >= MAX_NUMBER for dim in dims for n in dim.numbers.get("dim_value", [])):
            raise UnknownPart("an input or output of absurd size")

    def _read(self, what: str, known: dict[int, Known], data: memoryview) -> Message:
        message = Message(what)
        for number, wire, value in self.fields(data):
            field = known.get(number)
            if field is None or field.wire != wire:
                raise UnknownPart(REFUSED.get((what, number), f"a {what} with an unknown field ({number})"))
            values: list[int] | list[memoryview]
            if isinstance(value, int):
                values = message.numbers.setdefault(field.name, [])
                values.append(value)
            else:
                values = message.views.setdefault(field.name, [])
                values.append(value)
            if len(values) > 1 and not field.many:  # readers disagree on which counts
                raise UnknownPart(f"a {what} with two of {field.name}")
        return message

    def fields(self, data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
        at = 0
        while at < len(data):
            self.fields_left -= 1
            if self.fields_left < 0:
                raise UnknownPart("too many parts")
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if wire not in (NUMBER, BYTES, FOUR_BYTES):
                yield number, wire, 0  # refused by whoever asked: no field of ours looks like this
                return
            size, at = (4, at) if wire == FOUR_BYTES else _varint(data, at)
            if wire == NUMBER:
                yield number, wire, size
                continue
            if size > len(data) - at:
                raise UnknownPart("it is cut off")
            yield number, wire, data[at : at + size]
            at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise UnknownPart("it is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
    raise UnknownPart("it is damaged: a number too long")
