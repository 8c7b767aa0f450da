"""An ONNX policy whose products are of whole numbers, by ONNX Runtime's quantiser. Weights are int8, of seven bits:
older processors add two products of eight bits into sixteen. What goes into them is uint8. All else stays in floats, so
that the file has the same inputs and outputs."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sparring.errors import InputError
from sparring.export.given import Given
from sparring.export.onnx import render as render_floats
from sparring.export.whole_numbers import checked
from sparring.games import Dict
from sparring.games.spec import Array
from sparring.networks.policy import Policy

__all__ = ["render"]

PIECE = 64  # observations at once


def render(policy: Policy, given: Given) -> bytes:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    obs = checked(policy.game, given.calibration)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "floats.onnx", Path(folder) / "whole.onnx"
        model = onnx.load_from_string(render_floats(policy, given.value))
        metadata = list(model.metadata_props)
        model.graph.input.pop(_place(model.graph.input, "noise"))  # its default is a constant to the quantiser
        onnx.save(model, source)
        log = logging.getLogger()
        level = log.level
        log.setLevel(logging.ERROR)  # it advises to prepare the file first, which is for other exporters
        try:
            quantize_static(
                source, out, Reader(policy, obs), quant_format=QuantFormat.QDQ, op_types_to_quantize=["Conv", "Gemm"],
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, reduce_range=True, per_channel=True,
            )  # fmt: skip
        finally:
            log.setLevel(level)
        return _tidied(onnx.load(out), render_floats(policy, given.value), metadata)


class Reader:
    """What ONNX Runtime's quantiser asks for: feeds, one after the other, then None."""

    def __init__(self, policy: Policy, obs: Array) -> None:
        self._feeds = self._all(policy, obs)

    def _all(self, policy: Policy, obs: Array) -> Iterator[dict[str, Array]]:
        space = policy.game.observation
        for some in np.array_split(obs, -(-len(obs) // PIECE)):
            if isinstance(space, Dict):
                yield {f"obs.{name}": np.ascontiguousarray(some[name]) for name in space.fields}
            else:
                yield {"obs": np.ascontiguousarray(some)}

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def _place(values: Any, name: str) -> int:
    return [value.name for value in values].index(name)


def _tidied(model: Any, floats: bytes, metadata: list[Any]) -> bytes:
    """As bots take files: nothing but what they know (`onnx_check.py`)."""
    before = onnx.load_from_string(floats)
    noise = before.graph.input[_place(before.graph.input, "noise")]
    model.graph.input.append(noise)
    del model.graph.value_info[:]
    del model.metadata_props[:]
    model.metadata_props.extend(metadata)
    for field in ("producer_version", "doc_string", "model_version", "domain"):
        model.ClearField(field)
    model.producer_name = before.producer_name
    for entry in [entry for entry in model.opset_import if entry.domain]:
        if any(node.domain == entry.domain for node in model.graph.node):
            raise InputError(f"ONNX Runtime's quantiser wrote operators of {entry.domain}: use another version of it")
        model.opset_import.remove(entry)
    for node in model.graph.node:
        node.ClearField("doc_string")
        node.ClearField("name")
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model.SerializeToString(deterministic=True)
