"""What a format may be rendered with besides the policy."""

from collections.abc import Callable
from dataclasses import dataclass

from sparring.games.spec import Array
from sparring.networks.plain import Value

__all__ = ["Given"]


@dataclass(frozen=True, eq=False)
class Given:
    """
    :param value: The value of a state as one more output.
    :param calibration: A column of observations, for formats of whole numbers.
    :param on_progress: Hears in words what is being done.
    """

    value: Value | None = None
    calibration: Array | None = None
    on_progress: Callable[[str], object] = lambda words: None
