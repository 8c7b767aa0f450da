"""What the trainer says of each game, said once: that it failed, and what became of a candidate. For the terminal of
`sparring up`, whose trainer is another process with a log of its own."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sparring.api import TrainerStatus

__all__ = ["News", "following"]

EVERY = 1.0  # seconds between looks
FAILED = "failed: "
log = logging.getLogger(__name__)


class News:
    """Compares what the trainer says of each game with what it said before. What it said before we came is no news."""

    def __init__(self, trainer: Path) -> None:
        self._trainer = trainer
        self._seen: dict[str, int] = {}  # when a game's status was written, in ns
        self._decisions: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        for status in self._changed():
            self._decisions[status.game] = status.decision

    def look(self) -> list[str]:
        """Lines for people, of what is new since the last look."""
        return [line for status in self._changed() for line in self._lines(status)]

    def _lines(self, status: TrainerStatus) -> Iterator[str]:
        game, failure = status.game, self._failures.get(status.game)
        if status.state.startswith(FAILED):
            reason = status.state.removeprefix(FAILED)
            if reason != failure:  # the same one is tried again by itself, and is no news
                self._failures[game] = reason
                yield f"{game}: training failed: {reason}"
        elif failure is not None and status.state.startswith("training"):
            del self._failures[game]
            yield f"{game}: training goes on"
        if status.decision and status.decision != self._decisions.get(game):
            self._decisions[game] = status.decision
            yield f"{game}: {status.decision}"

    def _changed(self) -> Iterator[TrainerStatus]:
        for path in sorted(self._trainer.glob("*/status.json")):
            try:
                written = path.stat().st_mtime_ns
                if self._seen.get(path.parent.name) != written:
                    self._seen[path.parent.name] = written
                    yield msgspec.json.decode(path.read_bytes(), type=TrainerStatus)
            except FileNotFoundError:  # the game was deleted meanwhile
                continue
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.warning("%s cannot be read: %s", path, error)


@contextmanager
def following(trainer: Path, on_news: Callable[[str], None]) -> Iterator[None]:
    """Tells the news while the block runs, from a thread of its own."""
    stop, news = threading.Event(), News(trainer)

    def follow() -> None:
        while not stop.wait(EVERY):
            try:
                for line in news.look():
                    on_news(line)
            except Exception:  # a terminal that is gone, a disk that fails: the next look may succeed
                log.exception("what the trainer says cannot be shown")

    thread = threading.Thread(target=follow, name="news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
