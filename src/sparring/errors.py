"""Errors meant for people: what was asked, what was found, what to do. The CLI prints them without a stack trace."""

__all__ = ["Busy", "GameError", "InputError", "NotInstalled", "SparringError", "Unrenderable"]


class SparringError(Exception):
    """Something a user can understand and act on. Exit code 1."""


class InputError(SparringError):
    """The user's input is wrong: a game, a config, a file, an option. Exit code 2, HTTP 4xx."""


class NotInstalled(InputError):
    """A program or a library that this needs is not on this machine."""


class Busy(SparringError):
    """More waits than there is room for. Nothing was kept; try later."""


class GameError(SparringError):
    """A game's own code failed. `details` is its traceback, for the run's log."""

    details = ""


class Unrenderable(InputError):
    """A network of another library that our policies cannot be: it trains, but is neither evaluated nor published."""
