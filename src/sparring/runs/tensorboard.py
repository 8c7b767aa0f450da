"""TensorBoard's event files, written without TensorFlow: scalars only, as TFRecords of hand-encoded messages.
Ours because scalars are a page of code, and the writers that exist bring TensorBoard, PyTorch or protobuf with them.

Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; SessionLog log = 7 }
Summary { repeated Value { string tag = 1; float simple_value = 2 } value = 1 }
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from sparring.export.protobuf import BYTES, FOUR_BYTES, NUMBER, field

__all__ = ["EventFile"]


class EventFile:
    def __init__(self, directory: Path, step: int = 0) -> None:
        """A new file; what an earlier one has at `step` or later is no longer shown: it was lost and done again."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (directory / name).open("wb")
        self._write(field(3, BYTES, b"brain.Event:2"))
        if step:
            self._write(field(2, NUMBER, step) + field(7, BYTES, field(1, NUMBER, 1)))  # SessionLog: START

    def add(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(
            field(1, BYTES, field(1, BYTES, name.encode()) + field(2, FOUR_BYTES, struct.pack("<f", value)))
            for name, value in values.items()
        )
        self._write(field(2, NUMBER, step) + field(5, BYTES, summary))
        self._file.flush()

    def _write(self, event: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + event
        size = struct.pack("<Q", len(event))
        self._file.write(size + _masked_crc(size) + event + _masked_crc(event))

    def close(self) -> None:
        self._file.close()


def _table() -> list[int]:
    """CRC-32C (Castagnoli), reflected."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC = _table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
