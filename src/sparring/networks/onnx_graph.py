"""An ONNX graph while it is written: what layers and heads add their nodes to."""

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from sparring.games.spec import Array

__all__ = ["Graph"]


class Graph:
    """Nodes and constants under construction. Values are known by name."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()  # of a layer's input while it adds its nodes: channels last
        self.scope = ""  # goes before the names of constants: `torso.0.` while layer 0 adds its own
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def op(self, kind: str, *inputs: str | Array | float, **attributes: Any) -> str:
        """Adds a node: its result's name.

        :param kind: an operator of ONNX, such as "Gemm".
        :param inputs: names of values; arrays and numbers become constants.
        :param attributes: the operator's.
        """
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str | Array | float, outputs: int, **attributes: Any) -> list[str]:
        """As `op`, of an operator with several results."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        out = [f"v{len(self.nodes)}" if outputs == 1 else f"v{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, out, **attributes))
        return out

    def constant(self, value: Array | float, name: str | None = None) -> str:
        """A value that does not change: its name. Python's numbers become float32 and int64 scalars; NumPy's keep their
        type."""
        if isinstance(value, int | float) and not isinstance(value, np.generic):
            value = np.array(value, "f4" if isinstance(value, float) else "i8")
        array = np.asarray(value)
        name = f"{self.scope}{name}" if name else f"c{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def rename(self, names: dict[str, str]) -> None:
        for node in self.nodes:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
