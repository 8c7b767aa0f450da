"""The dashboard: one page of plain HTML, CSS and ES modules that the gateway serves as it is. No build step."""

from pathlib import Path

__all__ = ["STATIC"]

STATIC = Path(__file__).parent / "static"  # index.html is served at /, everything in here at /static/<file>
