"""TFLite files before LiteRT sees them, whoever made them: one graph, standard operators, and every number that says
where something is points into the file. (LiteRT's own check is of the form alone.)"""

import json
import math
import struct
from typing import Any

from sparring.errors import InputError
from sparring.export.tflite import schema

__all__ = ["FOR_EDGE_TPU", "check"]

FOR_EDGE_TPU = "edgetpu-custom-op"  # what Google's compiler makes of all that the Edge TPU runs

DAMAGE = (struct.error, LookupError, TypeError, ValueError, AttributeError, OverflowError, MemoryError, RecursionError)
MAX_BYTES = 256 << 20
MAX_ELEMENTS = 1 << 28
SIZES = {0: 4, 1: 2, 2: 4, 3: 1, 4: 8, 6: 1, 7: 2, 9: 1, 10: 8}  # bytes of an element: FLOAT32, FLOAT16, INT32, UINT8 …


def check(data: bytes, where: object, *, edge_tpu: bool = False) -> dict[str, Any] | None:
    """What one of our files says of itself; None: it is somebody else's.

    :param edge_tpu: It has to be one that was compiled for the Edge TPU. Otherwise it must not be.
    :raises InputError: it is no TFLite file, or one that we do not run.
    """
    if len(data) > MAX_BYTES:
        raise InputError(f"{where} has {len(data) >> 20} MiB, at most {MAX_BYTES >> 20} are run")
    if data[4:8] != b"TFL3":
        raise InputError(f"{where} is no TFLite file: it does not begin like one")
    s = schema()
    try:
        model = s.ModelT.InitFromObj(s.Model.GetRootAs(data, 0))
        return _checked(s, model, where, edge_tpu)
    except DAMAGE as error:
        raise InputError(f"{where} is a damaged TFLite file: {error}") from error


def _checked(s: Any, model: Any, where: object, edge_tpu: bool) -> dict[str, Any] | None:
    if len(model.subgraphs or []) != 1:
        raise InputError(f"{where} has {len(model.subgraphs or [])} graphs: files with one are run")
    if getattr(model, "externalBuffers", None) or any(buffer.offset or buffer.size for buffer in model.buffers):
        raise InputError(f"{where} keeps weights in another file, or behind its end: save it as one file")
    _check_operators(s, model, where, edge_tpu)
    graph = model.subgraphs[0]
    for tensor in graph.tensors:
        _check_tensor(model, tensor, where)
    for operator in graph.operators:
        _check_places(operator.inputs, len(graph.tensors), where, least=-1)
        _check_places(operator.outputs, len(graph.tensors), where)
        _check_places([operator.opcodeIndex], len(model.operatorCodes), where)
    _check_places([*graph.inputs, *graph.outputs], len(graph.tensors), where)
    return _about(model)


def _check_operators(s: Any, model: Any, where: object, edge_tpu: bool) -> None:
    known = {number: name for name, number in vars(s.BuiltinOperator).items() if not name.startswith("_")}
    strange = []
    for code in model.operatorCodes or []:
        number = max(code.builtinCode, code.deprecatedBuiltinCode)
        if code.customCode or known.get(number, "CUSTOM") in ("CUSTOM", "DELEGATE", "CALL", "IF", "WHILE"):
            strange.append((code.customCode or b"").decode(errors="replace")[:50] or known.get(number, number))
    if edge_tpu and FOR_EDGE_TPU not in strange:
        raise InputError(f"{where} is not compiled for the Edge TPU, which would run none of it: run edgetpu_compiler")
    if other := [name for name in strange if not (edge_tpu and name == FOR_EDGE_TPU)]:
        raise InputError(
            f"{where} has the operator {other[0]}, which is not a standard one"
            + ": it is compiled for the Edge TPU, where --runtime coral plays it" * (other[0] == FOR_EDGE_TPU)
        )


def _check_tensor(model: Any, tensor: Any, where: object) -> None:
    shape = [] if tensor.shape is None else [int(n) for n in tensor.shape]
    _check_places([tensor.buffer], len(model.buffers), where)
    size = math.prod(shape)
    if min([*shape, 1]) < 0 or size > MAX_ELEMENTS:
        raise InputError(f"{where} has a tensor of shape {shape[:8]}")
    if tensor.sparsity is not None or tensor.isVariable:
        raise InputError(f"{where} has sparse or variable tensors, which we do not take")
    data = model.buffers[tensor.buffer].data
    if data is not None and len(data) and len(data) != size * SIZES.get(tensor.type, 0):
        raise InputError(f"{where} has {len(data)} bytes for a tensor of shape {shape[:8]} and type {tensor.type}")


def _check_places(numbers: Any, count: int, where: object, least: int = 0) -> None:
    if any(not least <= int(number) < count for number in ([] if numbers is None else numbers)):
        raise InputError(f"{where} points to what it does not have: {[int(n) for n in numbers][:8]} of {count}")


def _about(model: Any) -> dict[str, Any] | None:
    for note in model.metadata or []:
        if note.name in (b"sparring", "sparring"):
            found = json.loads(bytes(model.buffers[note.buffer].data))
            if isinstance(found, dict) and isinstance(found.get("game"), str) and isinstance(found.get("bound"), str):
                return found
            raise ValueError("what it says of itself makes no sense")
    return None
