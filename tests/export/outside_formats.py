"""Export formats as somebody else writes them: the package does not know this file."""

import json

from sparring.errors import Unrenderable
from sparring.networks.policy import Policy


class Json:
    """The weights as lists, and the network as its layers' words."""

    suffix = ".json"

    def render(self, policy: Policy) -> bytes:
        network = [f"{layer.kind} {layer.summary()}" for layer in policy.layers]
        params = {name: array.tolist() for name, array in policy.params.items()}
        return json.dumps({"network": network, "params": params}).encode()


class Folder:
    suffix = ""

    def render(self, policy: Policy) -> dict[str, bytes]:
        return {f"weights/{name}.bin": array.tobytes() for name, array in policy.params.items()} | {"game.txt": b"g"}


class Astray:
    suffix = ""

    def render(self, policy: Policy) -> dict[str, bytes]:
        return {"../astray.txt": b""}


class Picky:
    suffix = ".picky"

    def render(self, policy: Policy) -> bytes:
        raise Unrenderable("picky has no dense layers")


class NoFormat:
    suffix = ".none"
