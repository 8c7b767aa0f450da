"""ONNX files that others made: what is looked at before ONNX Runtime sees them. They may have any standard operator,
but no other files beside them, no operators of their own, and no tensors whose size is a lie.

Bots do not take such files (`export/onnx_check.py`); a person on the command line may."""

import math
from collections.abc import Iterator
from typing import Any

from sparring.errors import InputError

__all__ = ["check"]

DOMAINS = ("", "ai.onnx")
MAX_ELEMENTS = 1 << 28
DEEPEST = 4  # graphs within graphs


def check(data: bytes, where: object) -> None:
    """:raises InputError: it is no ONNX file, or one that we do not run."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it comes with onnx
    from onnx import ModelProto, TensorProto

    try:
        model = ModelProto.FromString(data)
    except DecodeError as error:
        raise InputError(f"{where} is no ONNX file, or damaged: {error}") from error
    if not model.HasField("graph") or not model.graph.node or not model.opset_import:
        raise InputError(f"{where} is no ONNX file: it has no graph, or no operator set")
    domains = sorted({entry.domain for entry in model.opset_import} - {*DOMAINS})
    nodes = list(_nodes(model.graph, where))
    domains += sorted({node.domain for node in nodes} - {*DOMAINS, *domains})
    if domains or model.functions:
        raise InputError(f"{where} has operators that are not standard: {', '.join(domains) or 'functions of its own'}")
    for tensor in _tensors(model.graph, nodes):
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            raise InputError(f"{where} keeps {tensor.name[:80]!r} in another file: save it as one file")
        if min([*tensor.dims, 0]) < 0 or math.prod(tensor.dims) > MAX_ELEMENTS:
            raise InputError(f"{where} says that {tensor.name[:80]!r} has the shape {list(tensor.dims)[:8]}")
        if tensor.raw_data and not _honest(tensor):
            shape = list(tensor.dims)[:8]
            raise InputError(f"{where} has {len(tensor.raw_data)} bytes for {tensor.name[:80]!r} of shape {shape}")


def _honest(tensor: Any) -> bool:
    from onnx import helper

    try:
        size = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError):
        return False
    return len(tensor.raw_data) == math.prod(tensor.dims) * size or tensor.data_type > 16  # packed, of a few bits


def _nodes(graph: Any, where: object, depth: int = 0) -> Iterator[Any]:
    if depth > DEEPEST:
        raise InputError(f"{where} has graphs within graphs, more than {DEEPEST} deep")
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _nodes(inner, where, depth + 1)


def _tensors(graph: Any, nodes: list[Any]) -> Iterator[Any]:
    yield from graph.initializer
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from inner.initializer
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise InputError("the ONNX file has sparse tensors, which we do not take")
