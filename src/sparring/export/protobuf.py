"""Protobuf's wire form, as far as we write it by hand: what of it an ONNX policy and TensorBoard's events have."""

__all__ = ["BYTES", "FOUR_BYTES", "NUMBER", "field"]

NUMBER, BYTES, FOUR_BYTES = 0, 2, 5  # wire types; we need no others


def field(number: int, wire: int, value: int | bytes | memoryview) -> bytes:
    """A field of a message, by its number in the .proto file."""
    key = _varint(number << 3 | wire)
    if isinstance(value, int):
        return key + _varint(value)
    return key + (_varint(len(value)) if wire == BYTES else b"") + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
