"""Pictures for the documentation: Chromium's screenshots, rewritten with a palette, which halves them."""

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
from playwright.sync_api import Page

__all__ = ["save"]

PIXELS = """async (png) => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const bytes = canvas.getImageData(0, 0, image.width, image.height).data;
  const parts = [];
  for (let at = 0; at < bytes.length; at += 32768) parts.push(String.fromCharCode(...bytes.subarray(at, at + 32768)));
  return [image.width, image.height, btoa(parts.join(""))];
}"""


def save(page: Page, path: Path) -> None:
    """The page as it is seen now. Its 255 most frequent colours stay, the few pixels of others take the nearest one."""
    width, height, data = page.evaluate(PIXELS, base64.b64encode(page.screenshot()).decode())
    packed = np.frombuffer(base64.b64decode(data), "<u4") & 0xFFFFFF
    values, which, counts = np.unique(packed, return_inverse=True, return_counts=True)
    colours = np.stack([values >> shift & 0xFF for shift in (0, 8, 16)], axis=1).astype(np.int32)
    palette = colours[np.sort(np.argsort(counts)[-255:])]
    nearest = np.abs(colours[:, None] - palette).sum(axis=2).argmin(axis=1).astype(np.uint8)
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = nearest[which].reshape(height, width)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = {
        b"IHDR": header,
        b"PLTE": palette.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(rows.tobytes(), 9),
        b"IEND": b"",
    }
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks.items()
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
