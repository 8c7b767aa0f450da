"""Starting and ending A/B tests: see `ab`. One runs at a time for each game."""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from sparring.errors import InputError
from sparring.registry.ab import AbResults, AbTest, AbTests
from sparring.registry.aliases import Aliases
from sparring.registry.backends import Conflict
from sparring.registry.versions import NotPublished, folder_of, log

__all__ = ["AbRunning", "AbTesting", "NotRunning", "path_of", "words"]

KEPT = 20  # tests that have ended


class AbRunning(InputError):
    """Another test runs, or a test cannot end like this."""


class NotRunning(InputError):
    """There is no test to end."""


class AbTesting(Aliases):
    """A/B tests of a registry's models. `Registry` adds publishing."""

    def __init__(self, location: str | Path) -> None:
        super().__init__(location)
        self._torn: dict[str, bytes] = {}  # by path: what was said to be unreadable

    def ab(self, game: str) -> AbTests:
        """The test that runs, and those that have ended. One small read."""
        path = path_of(game)
        return self._tests(path, self._get(path))

    def start_ab(self, game: str, shares: Mapping[str, float], *, reason: str = "", by: str, cursor: int = 0) -> AbTest:
        """Gives players one of several models each, at its `stable` version.

        :param game: The game's name.
        :param shares: Of the players, by model; their sum is 1.
        :param reason: What it shall show, in a sentence for people.
        :param by: Who starts it.
        :param cursor: Of the store: episodes after it count.
        :raises NotPublished: a model has no version for players.
        :raises AbRunning: another test runs.
        """
        _check_shares(shares)
        for model in shares:
            if self.latest(game, model) is None:
                raise NotPublished(self.no_model(game, model))
        started = AbTest(secrets.token_hex(6), dict(shares), time.time(), by, reason, cursor)

        def begin(now: AbTests) -> AbTests:
            if now.running is not None:
                raise AbRunning(
                    f"an A/B test of {game} runs already ({words(now.running)}): `sparring ab stop {game}` ends it"
                )
            return AbTests(started, now.ended)

        self._change(game, begin)
        return started

    def end_ab(
        self, game: str, *, kept: str | None = None, results: AbResults | None = None, expected: str | None = None
    ) -> AbTest:
        """Ends the test that runs: `bot` is what all players get again. `Registry.stop_ab` lets them keep another.

        :param kept: The model that they get, for the record.
        :param results: How it stood.
        :param expected: Only if it is the test of this id.
        :raises NotRunning: there is none.
        """
        done: list[AbTest] = []
        none = f"no A/B test of {game} runs: `sparring ab start {game} MODEL=SHARE …` starts one"
        if self.ab(game).running is None:  # perhaps nothing of the game was ever published
            raise NotRunning(none)

        def end(now: AbTests) -> AbTests:
            if now.running is None or expected not in (None, now.running.id):
                raise NotRunning(none)
            done[:] = [msgspec.structs.replace(now.running, ended=time.time(), kept=kept, results=results)]
            return AbTests(None, [*done, *now.ended][:KEPT])

        self._change(game, end)
        return done[0]

    def no_model(self, game: str, model: str) -> str:
        """For people: what there is instead of a model that has no version for players."""
        there = [name for name in self.models(game) if self.latest(game, name) is not None]
        found = f"it has {', '.join(there)}" if there else "it has none yet"
        return f"{game} has no version of the model {model[:100]!r} for players: {found}"

    def _tests(self, path: str, raw: bytes | None) -> AbTests:
        if raw is None:
            return AbTests()
        try:
            return msgspec.json.decode(raw, type=AbTests)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if self._torn.get(path) != raw:
                log.warning("%s is damaged, so there is no A/B test: %s", path, error)
                self._torn[path] = raw
            return AbTests()

    def _change(self, game: str, change: Callable[[AbTests], AbTests]) -> None:
        """By compare-and-swap: whoever comes second looks again."""
        path = path_of(game)
        folder, _, name = path.rpartition("/")
        while True:
            with self._backend.alone(folder):
                with self._explained(f"read {path} in"):
                    found = self._backend.get(path)
                text = msgspec.json.encode(change(self._tests(path, None if found is None else found.data)))
                try:
                    self._put(path, text, absent=found is None, tag="" if found is None else found.tag)
                except Conflict:
                    if self._get(path) != text:  # else its answer was lost, and it was sent again
                        continue
                self._backend.sync(folder, name)
                return


def path_of(game: str) -> str:
    return f"{folder_of(game).removesuffix('/models')}/ab.json"


def _check_shares(shares: Mapping[str, float]) -> None:
    if len(shares) < 2:
        raise InputError("an A/B test needs two models or more, each with its share, like bot=0.5 careful=0.5")
    for model, share in shares.items():
        if not (math.isfinite(share) and 0 < share < 1):
            raise InputError(f"the share of {model[:100]!r} is {share:g}: use a number between 0 and 1")
    if abs((total := math.fsum(shares.values())) - 1) > 1e-6:
        raise InputError(f"the shares add up to {total:g}: they must add up to 1")


def words(test: AbTest) -> str:
    return ", ".join(f"{model} {share:g}" for model, share in test.shares.items())
