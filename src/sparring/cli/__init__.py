"""The command line: a module for each group of commands. Thin: parses, calls, prints; nothing imports it."""

import os

# Before NumPy loads: our matrices are small, and its threads would only wait for each other. Beside busy workers an
# evaluation from pixels then takes three times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from sparring.cli.entry import main

__all__ = ["main"]
