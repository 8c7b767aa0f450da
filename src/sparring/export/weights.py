"""A policy as safetensors, for whoever trains on from it: its arrays, and all the rest as JSON in the file's metadata.
No pickle, and nothing of a file is believed before it was checked."""

import struct
import sys

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from sparring.errors import InputError
from sparring.games import Game
from sparring.networks.layers import Layer, decode, decode_imported
from sparring.networks.policy import Policy
from sparring.networks.spec import Head

__all__ = ["load", "save"]

FORMAT = 1
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # how msgspec refuses JSON


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a policy is besides its arrays."""

    format: int
    game: Game
    layers: tuple[Layer, ...]
    head: Head
    exploration: float


class Metadata(msgspec.Struct, frozen=True):
    # One key only: safetensors writes several in an order that changes from call to call.
    sparring: str


class Header(msgspec.Struct, frozen=True):
    metadata: Metadata = msgspec.field(name="__metadata__")


def save(policy: Policy) -> bytes:
    """The same bytes for the same policy."""
    spec = Spec(FORMAT, policy.game, policy.layers, policy.head, policy.exploration)
    arrays = {name: np.ascontiguousarray(array) for name, array in policy.params.items()}
    return save_arrays(arrays, {"sparring": msgspec.json.encode(spec, order="sorted").decode()})


def load(data: bytes, *, trusted: bool = False) -> Policy:
    """The policy of a file.

    :param trusted: import the modules of layers and games that are not ours, by the names in the file. Without it they
        have to be imported already: a file from anywhere must not choose what is run here.
    :raises InputError: it is not a policy in working order.
    """
    try:
        spec = _spec(data, trusted)
        arrays = load_arrays(data)
    except (SafetensorError, *UNREADABLE, struct.error, KeyError) as error:
        raise InputError(f"not a policy in safetensors format, or damaged: {error}") from error
    module, outside, _ = (spec.game.env or "").rpartition(":")
    if outside and not trusted and module not in sys.modules:
        raise InputError(f"the policy's game is {spec.game.env!r}: import {module!r} before, if you trust it")
    wrong = [f"{name}: {array.dtype}" for name, array in arrays.items() if array.dtype != np.float32]
    if wrong:
        raise InputError(f"a policy's arrays are float32, found {', '.join(wrong)}")
    policy = Policy(spec.game, spec.layers, spec.head, arrays, spec.exploration)
    if (why := policy.problem()) is not None:
        raise InputError(f"a policy that cannot be played: {why}")
    return policy


def _spec(data: bytes, trusted: bool) -> Spec:
    """From the header: its length in 8 bytes, then JSON. (safetensors gives metadata of files only, not of bytes.)"""
    (size,) = struct.unpack_from("<Q", data)
    text = msgspec.json.decode(data[8 : 8 + size], type=Header).metadata.sparring
    version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("format")
    if version is not None and bytes(version) != str(FORMAT).encode():
        raise InputError(f"policy of format {bytes(version).decode()}, this Sparring reads {FORMAT}: update it")
    return msgspec.json.decode(text, type=Spec, dec_hook=decode if trusted else decode_imported)
