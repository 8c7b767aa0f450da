"""Names that point to versions, and the journal of their moves.

    games/<game>/models/<model>/latest.json           the alias `stable`: what players get
    games/<game>/models/<model>/aliases/<name>.json   any other; `candidate` is the trainer's
    games/<game>/models/<model>/moves/<number>.json   the journal: one move each, created once, never changed

A move is written to the journal first and then to the pointer, by compare-and-swap. The pointer has its move's number,
and a move the number of the one it follows. An entry outside that chain was never done: its writer was killed, or
somebody else was quicker. Nobody is shown it.

Where a pointer is torn, the journal decides: the newest move of `stable` to a version that is whole.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from sparring.errors import InputError
from sparring.games.spec import NAME
from sparring.registry.backends import Conflict
from sparring.registry.manifest import CANDIDATE, DEFAULT_MODEL, STABLE, Alias, Manifest, Move, Pointer, Serving
from sparring.registry.pointers import alias_after, alias_at, check_alias, path_of, pointer_of, pointer_to
from sparring.registry.versions import MANIFEST, NotPublished, Versions, folder_of, log, sha256_of

__all__ = ["Aliases", "Moved", "Pinned"]

ABSENT = 2.0  # seconds for which a model that has no `stable` is not looked through again
MAX_ALIASES = 1000  # of a model, also removed ones: each is a file, and read whenever they are listed
MAX_ABSENT = 1000  # such models that are remembered
KEPT_MOVES = 1000  # of the journal, the newest; older ones go FORGOTTEN at a time
FORGOTTEN = 500
OLDER = "latest"  # what manifests say that have no alias
MOVE = re.compile(r".*/moves/([1-9][0-9]{0,14})\.json")


class Pinned(InputError):
    """`stable` is pinned: only people move it."""


class Moved(InputError):
    """The alias is not where the caller believed it to be."""


class Target(NamedTuple):
    """Where an alias is found."""

    manifest: Manifest | None = None
    alias: Alias | None = None
    move: int | None = None


class Listing(NamedTuple):
    """What a model's folder has: numbers of whole versions and of moves, newest first."""

    versions: list[int]
    moves: list[int]


class Aliases(Versions):
    """Aliases of a registry's versions. `Registry` adds publishing."""

    def __init__(self, location: str | Path) -> None:
        super().__init__(location)
        self._targets: dict[tuple[str, str, str], tuple[bytes | None, Target]] = {}
        self._absent: dict[tuple[str, str], float] = {}  # models without `stable`, and when that was found

    # Where aliases are

    def latest(self, game: str, model: str = DEFAULT_MODEL) -> Manifest | None:
        """The version that players get: the one that `stable` names. Cheap while `latest.json` says the same: one
        small read.

        :param game: The game's name.
        :param model: The model's name.
        :returns: Its manifest; None where nothing is published for players.
        """
        return self._target(game, model, STABLE).manifest

    def named(self, game: str, model: str, alias: str) -> Manifest | None:
        """The version that an alias names; None where there is no such alias. As cheap as `latest`."""
        return self._target(game, model, alias).manifest

    def serving(self, game: str, model: str = DEFAULT_MODEL) -> Serving:
        """What a model's players get. Two small reads while nothing is moved. A pinned version is what all get."""
        stable, alias, _ = self._target(game, model, STABLE)
        if alias is not None and alias.pinned:
            return Serving(stable)
        candidate = self._target(game, model, CANDIDATE)
        if candidate.alias is None or candidate.manifest is None or candidate.manifest == stable:
            return Serving(stable)
        return Serving(stable, candidate.manifest, candidate.alias.share)

    def aliases(self, game: str, model: str = DEFAULT_MODEL) -> dict[str, Alias]:
        """Aliases of a model, `stable` first."""
        names = (STABLE, *self._names(game, model))
        found = [self._target(game, model, name).alias for name in names]
        return {alias.name: alias for alias in found if alias is not None}

    def _names(self, game: str, model: str) -> list[str]:
        """Of aliases that there are or were."""
        folder = f"{folder_of(game, model)}/aliases"
        with self._explained(f"list {folder} in"):
            names = sorted(re.findall(r"/aliases/([^/#]+)\.json$", "\n".join(self._backend.list(folder)), re.MULTILINE))
        return [*filter(NAME.fullmatch, names)]

    def moves(self, game: str, model: str = DEFAULT_MODEL, limit: int = 50) -> list[Move]:
        """What was moved, newest first."""
        done: list[Move] = []
        for move in self._done(game, model):
            if len(done) >= limit:
                break
            done.append(move)
        return done

    # Moving them

    def move(
        self,
        game: str,
        model: str,
        alias: str,
        version: int | None,
        *,
        reason: str,
        by: str,
        evidence: Mapping[str, float] = {},
        share: float = 0.0,
        expected: int | UnsetType | None = UNSET,
    ) -> Move:
        """Points an alias to a version.

        :param game: The game's name.
        :param model: The model's name.
        :param alias: `stable`, `candidate`, or a name of your own.
        :param version: Where to; None removes the alias.
        :param reason: One sentence for people.
        :param by: Who moves it: trainer, person, …
        :param evidence: The numbers behind the reason.
        :param share: Of a candidate: in which share of the episodes it plays.
        :param expected: Only if the alias is there now; None: only if there is none.
        :returns: The entry of the journal.
        :raises NotPublished: there is no such version, or it is not whole.
        :raises Pinned: `stable` is pinned, and it is the trainer that asks.
        :raises Moved: the alias is not where it was expected.
        """
        check_alias(alias)
        if version is None and alias == STABLE:
            raise InputError(f"{STABLE!r} is what players get: move it to another version instead of removing it")
        if version is None and self._target(game, model, alias).alias is None:
            raise NotPublished(f"{game} {model} has no alias {alias!r}")
        if version is not None and alias not in (STABLE, CANDIDATE):
            self._require_room(game, model, alias)
        sha256 = "" if version is None else self._hash(game, model, version)

        def draft(now: Alias | None, _: Pointer | None) -> Move:
            at = now.version if now else None
            _check_expected(game, model, alias, at, expected)
            _check_pin(game, model, alias, now, by)
            pinned = now is not None and now.pinned
            return Move(0, alias, version, at, time.time(), by, reason, dict(evidence), pinned, share, sha256)

        return self._swap(game, model, alias, draft)

    def _require_room(self, game: str, model: str, alias: str) -> None:
        names = self._names(game, model)
        if len(names) >= MAX_ALIASES and alias not in names:
            raise InputError(
                f"{game} {model} has or had {len(names)} aliases, and takes no more: use one of these names"
            )

    def rollback(
        self,
        game: str,
        model: str = DEFAULT_MODEL,
        *,
        reason: str = "",
        by: str,
        expected: int | UnsetType | None = UNSET,
    ) -> Move:
        """Points `stable` to what it was before its last move to another version. Done twice, it is back: say where
        it is `expected` if you may ask twice.

        :raises Moved: it is not where it was expected.
        :raises NotPublished: there is nothing to go back to.
        :raises Pinned: it is pinned, and it is the trainer that asks.
        """
        self._check_stable(game, model, "roll back")

        def draft(now: Alias | None, _: Pointer | None) -> Move:
            if now is None:
                raise Moved(f"{game} {model} was deleted meanwhile")
            _check_expected(game, model, STABLE, now.version, expected)
            _check_pin(game, model, STABLE, now, by)
            back = self._before(game, model, now.version)
            why = reason or f"rolled back from version {now.version}"
            sha256 = self._hash(game, model, back)
            return Move(0, STABLE, back, now.version, time.time(), by, why, pinned=now.pinned, sha256=sha256)

        return self._swap(game, model, STABLE, draft)

    def pin(
        self,
        game: str,
        model: str = DEFAULT_MODEL,
        pinned: bool = True,
        *,
        version: int | None = None,
        reason: str = "",
        by: str,
    ) -> Move:
        """Holds `stable` where it is, or at a version: the trainer does not move it until it is unpinned (`pinned`
        false)."""
        if version is None:
            self._check_stable(game, model, "pin")
        sha256 = "" if version is None else self._hash(game, model, version)

        def draft(now: Alias | None, _: Pointer | None) -> Move:
            at = now.version if now else None
            to = version or at
            if to is None:
                raise Moved(f"{game} {model} was deleted meanwhile")
            why = reason or ("pinned" if pinned else "unpinned")
            if not reason and to == at and (came := self._why(game, model)):
                why += f"; {came}"
            same = sha256 or self._hash(game, model, to)
            return Move(0, STABLE, to, at, time.time(), by, why, pinned=pinned, sha256=same)

        return self._swap(game, model, STABLE, draft)

    # Finding targets

    def _why(self, game: str, model: str) -> str:
        """`stable` is the version that it is; whatever was pinned since."""
        moved = (m.reason for m in self._done(game, model) if m.alias == STABLE and m.version != m.previous)
        return next(moved, "")

    def _check_stable(self, game: str, model: str, verb: str) -> None:
        if self.latest(game, model) is None:
            raise NotPublished(f"players of {game} get no version of the model {model!r} yet: nothing to {verb}")

    def _forget(self, game: str, model: str) -> None:
        self._absent.pop((game, model), None)
        for key in [key for key in self._targets if key[:2] == (game, model)]:
            self._targets.pop(key, None)

    def _target(self, game: str, model: str, alias: str) -> Target:
        folder = folder_of(game, model)
        raw = self._get(path_of(folder, check_alias(alias)))
        key = (game, model, alias)
        known_raw, known = self._targets.get(key, (None, Target()))
        if raw is not None and raw == known_raw:
            return known
        if raw is None and alias == STABLE and time.monotonic() < self._absent.get(key[:2], 0.0) + ABSENT:
            return Target()
        target = self._resolve(game, model, alias, raw, known.manifest)
        if raw is None and alias == STABLE and target.manifest is None:
            if len(self._absent) >= MAX_ABSENT:
                self._absent.clear()
            self._absent[key[:2]] = time.monotonic()
        if raw is not None or target.manifest is not None:  # else names that nobody published would fill the memory
            self._targets[key] = raw, target
        return target

    def _resolve(self, game: str, model: str, alias: str, raw: bytes | None, known: Manifest | None = None) -> Target:
        pointer = pointer_of(raw)
        if pointer is not None and pointer.version is None:
            return Target(move=pointer.move)
        if pointer is not None and pointer.version is not None:
            manifest = self._whole(game, model, pointer.version, pointer.sha256)
            if manifest is not None or alias != STABLE:
                return Target(manifest, alias_at(alias, pointer), pointer.move)
        if raw is None and alias != STABLE:
            return Target()
        return self._from_journal(game, model, alias, known, raw is not None)

    def _from_journal(self, game: str, model: str, alias: str, known: Manifest | None, lost: bool) -> Target:
        """The pointer is torn, or names what is not whole, or is not there.

        :param lost: There was one: versions were published for players, though the journal may not say which.
        """
        listing = self._listing(folder_of(game, model))

        def whole(version: int | None, sha256: str = "") -> Manifest | None:
            if version not in listing.versions:
                return None
            return known if known and known.version == version else self._whole(game, model, version, sha256 or None)

        moves = list(self._read_moves(game, model, listing.moves, alias))
        if alias != STABLE:  # not an older one: it may have been rejected
            manifest = whole(moves[0].version, moves[0].sha256) if moves else None
            return Target() if manifest is None else Target(manifest, alias_after(moves[0]), moves[0].number)
        newest = moves[0] if moves else None
        if not lost and all(move.after is None for move in moves):
            moves.reverse()  # several publish for the first time: who comes to the journal first is seen first
        pinned, number = (newest.pinned, newest.number) if newest else (False, None)
        for move in moves:
            if (manifest := whole(move.version, move.sha256)) is not None:
                return Target(manifest, alias_after(msgspec.structs.replace(move, pinned=pinned)), number)
        for version in listing.versions:
            manifest = whole(version)
            if manifest is not None and (manifest.alias == OLDER or (manifest.alias == STABLE and (lost or moves))):
                return Target(manifest, Alias(STABLE, version, manifest.created, pinned=pinned), number)
        return Target()

    def _hash(self, game: str, model: str, version: int) -> str:
        """Of a version that is whole."""
        manifest = self._whole(game, model, version)
        text = None if manifest is None else self._get(f"{folder_of(game, model)}/{version}/manifest.json")
        if text is None:
            there = self.versions(game, model)
            found = f"it has {_ranges(there)}" if there else "it has none"
            raise NotPublished(f"{game} has no whole version {version} of the model {model!r}: {found}")
        return sha256_of(text)

    def _before(self, game: str, model: str, version: int) -> int:
        """Where `stable` was before it came to a version."""
        listing = self._listing(folder_of(game, model))
        passed = (move.previous for move in self._done(game, model) if move.alias == STABLE)
        for previous in dict.fromkeys(passed):
            if previous is None or previous == version or previous not in listing.versions:
                continue
            if self._whole(game, model, previous) is not None:
                return previous
        for older in listing.versions:  # before there was a journal, each version was the next one's predecessor
            if older < version:
                manifest = self._whole(game, model, older)
                if manifest is not None and manifest.alias in (STABLE, OLDER):
                    return older
        raise NotPublished(f"{game} {model} was at no other version before version {version}: there is no way back")

    # The journal

    def _listing(self, folder: str) -> Listing:
        with self._explained(f"list {folder} in"):
            paths = list(self._backend.list(folder))
        versions = [int(found[3]) for found in map(MANIFEST.fullmatch, paths) if found]
        moves = [int(found[1]) for found in map(MOVE.fullmatch, paths) if found]
        return Listing(sorted(versions, reverse=True), sorted(moves, reverse=True))

    def _read_moves(self, game: str, model: str, numbers: list[int], alias: str | None = None) -> Iterator[Move]:
        for number in numbers:
            path = f"{folder_of(game, model)}/moves/{number}.json"
            raw = self._get(path)
            try:
                move = None if raw is None else msgspec.json.decode(raw, type=Move)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("passing over %s, which is damaged: %s", path, error)
                continue
            if move is not None and alias in (None, move.alias):
                yield move

    def _done(self, game: str, model: str) -> Iterator[Move]:
        """Moves that were done, newest first."""
        folder = folder_of(game, model)
        newest: dict[str, float] = {}  # by alias: the number of its next move back
        for move in self._read_moves(game, model, self._listing(folder).moves):
            if move.alias not in newest:
                pointer = pointer_of(self._get(path_of(folder, move.alias)))
                newest[move.alias] = math.inf if pointer is None or pointer.move is None else pointer.move
            if move.number <= newest[move.alias]:
                newest[move.alias] = 0 if move.after is None else move.after
                yield move

    def _swap(self, game: str, model: str, alias: str, draft: Callable[[Alias | None, Pointer | None], Move]) -> Move:
        """One move: the journal, then the pointer. Whoever comes second looks again.

        :param draft: Makes the move from where the alias is; what it raises ends the attempt.
        """
        folder = folder_of(game, model)
        path = path_of(folder, alias)
        self._absent.pop((game, model), None)
        while True:
            with self._backend.alone(folder):
                with self._explained(f"read {path} in"):
                    found = self._backend.get(path)
                raw = None if found is None else found.data
                now = self._resolve(game, model, alias, raw)
                move = draft(now.alias, pointer_of(raw))
                _check_finite(move)
                move = self._note(folder, msgspec.structs.replace(move, after=now.move))
                text = msgspec.json.encode(pointer_to(move))
                try:
                    self._put(path, text, absent=found is None, tag="" if found is None else found.tag)
                except Conflict:
                    if self._get(path) != text:  # else its answer was lost, and it was sent again
                        continue
                place, _, name = path.rpartition("/")
                self._backend.sync(place, name)
            break
        if alias == STABLE and move.version != move.previous:
            self._drop_candidate(game, model, move)
        return move

    def _note(self, folder: str, move: Move) -> Move:
        """Into the journal, with the next number that is free."""
        moves = self._listing(folder).moves
        if len(moves) >= KEPT_MOVES + FORGOTTEN:
            self._forget_moves(folder, moves[KEPT_MOVES:])
        number = max(moves, default=0) + 1
        while True:
            move = msgspec.structs.replace(move, number=number)
            path, text = f"{folder}/moves/{number}.json", msgspec.json.encode(move)
            try:
                self._put(path, text, absent=True)
            except Conflict:
                if self._get(path) != text:
                    number += 1  # another one was quicker
                    continue
            self._backend.sync(f"{folder}/moves", f"{number}.json")
            return move

    def _forget_moves(self, folder: str, old: list[int]) -> None:
        """All but those that brought an alias where it is. Not now, if a pointer is torn: they may mend it."""
        with self._explained(f"list {folder}/aliases in"):
            paths = [f"{folder}/latest.json", *self._backend.list(f"{folder}/aliases")]
        pointers = [pointer_of(raw) for raw in map(self._get, paths) if raw is not None]
        named = {pointer.move for pointer in pointers if pointer is not None}
        if None in pointers:
            return
        with self._explained(f"delete old moves of {folder} in"):
            self._backend.delete([f"{folder}/moves/{number}.json" for number in old if number not in named])

    def _drop_candidate(self, game: str, model: str, done: Move) -> None:
        """A candidate that was promoted, or that `stable` was rolled back from, is none any more."""
        candidate = self._target(game, model, CANDIDATE).alias
        if candidate is None or candidate.version not in (done.version, done.previous):
            return
        promoted = candidate.version == done.version
        why = f"version {candidate.version} is {STABLE}" if promoted else done.reason
        try:
            self.move(game, model, CANDIDATE, None, reason=why, by=done.by, expected=candidate.version)
        except Moved:
            log.info("%s %s: there is another candidate already", game, model)


def _check_pin(game: str, model: str, alias: str, now: Alias | None, by: str) -> None:
    if alias == STABLE and by == "trainer" and now is not None and now.pinned:
        raise Pinned(f"{game} {model} is pinned to version {now.version}: `sparring unpin {game}` lets it move again")


def _check_expected(game: str, model: str, alias: str, at: int | None, expected: int | UnsetType | None) -> None:
    if expected is not UNSET and at != expected:
        raise Moved(
            f"the alias {alias!r} of {game} {model} is {_at(at)}, not {_at(expected)}: somebody moved it meanwhile"
        )


def _check_finite(move: Move) -> None:
    for name, value in (*move.evidence.items(), ("share", move.share)):
        if not math.isfinite(value):
            raise InputError(f"{name} of a move is {value}: leave it out, the journal has finite numbers only")
    if not 0 <= move.share <= 1:
        raise InputError(f"a candidate's share is {move.share}: use a number from 0 to 1")


def _at(version: int | None) -> str:
    return "nowhere" if version is None else f"at version {version}"


def _ranges(numbers: list[int]) -> str:
    """1–4, 7"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts)
