"""The command line: a module for each group of commands. Thin: parses, calls, prints; nothing imports it."""

from sparring.cli.entry import main

__all__ = ["main"]
