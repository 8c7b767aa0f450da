"""Where versions are published and found: a directory, or a bucket with the same layout.

    games/<game>/models/<model>/<version>/{policy.onnx, policy.safetensors, card.md, manifest.json}
    games/<game>/models/<model>/{latest.json, aliases/<name>.json, moves/<number>.json}: see `aliases.py`
    games/<game>/ab.json: see `ab.py`

`policy.onnx` is created first and claims the number; the manifest is created last, and a version exists once it does.
A version is never changed, pointers to it are. Whoever is killed half-way leaves a number unused. Of a game that was
deleted `<version>/deleted` stays, with its highest number.

On a directory every file is on disk (fsync; obstore itself never calls it) before the manifest appears. So a power loss
can take the newest version back but not leave it torn, and its number is not given out again. Should a disk lose bytes
all the same, the manifest's hashes show it, and `latest` is the version before that is whole.
"""

import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sparring.errors import InputError, SparringError
from sparring.export import formats, onnx_check
from sparring.networks.policy import Policy
from sparring.registry.ab import AbResults, AbTest
from sparring.registry.ab_tests import AbRunning, AbTesting, NotRunning, path_of, words
from sparring.registry.aliases import Moved, Pinned
from sparring.registry.backends import Conflict
from sparring.registry.card import card
from sparring.registry.manifest import (
    CANDIDATE,
    DEFAULT_MODEL,
    STABLE,
    Alias,
    DataSpan,
    FileInfo,
    Manifest,
    Move,
    Pointer,
)
from sparring.registry.pointers import check_alias, pointer_of
from sparring.registry.versions import MANIFEST, VERSION, NotPublished, RegistryError, folder_of, sha256_of

__all__ = ["AbRunning", "Moved", "NotPublished", "NotRunning", "Pinned", "Registry", "RegistryError"]

OURS = re.compile(
    r"games/[^/]+/models/([^/]+)/(?:latest\.json|aliases/[^/]+\.json|moves/[^/]+\.json|([1-9][0-9]{0,14})/[^/]+)"
)
FORMS = ("onnx", "safetensors")  # of a version's files, always: to play, and to train on from
KEPT_MOVES = 10  # versions that this many of the newest moves of `stable` name are not retired


class Overtaken(Exception):
    """`stable` is at a later version already."""


class Registry(AbTesting):
    """Published versions of models, each with its policy as ONNX and safetensors, a card and a manifest.

    Safe to share between threads, and its location between processes and machines. (Not across a fork: obstore has
    threads of its own.)

    In its methods `game`, `model` and `alias` are names, and `version` is a version's number. `reason` and `by` say why
    something is done and by whom; the journal keeps them. `expected` is what must be there for the change to be made.
    `limit` is how many are given at most.

    :param location: A directory, a bucket's URL such as s3://BUCKET/PREFIX?region=…, or `module:Class?option=value`:
        a backend from outside (`sparring.registry.backends.Backend`).
    :raises InputError: there can be no registry at that location.
    """

    def publish(
        self,
        policy: Policy,
        *,
        model: str = DEFAULT_MODEL,
        algorithm: str,
        metrics: Mapping[str, float] = {},
        config: Mapping[str, Any] = {},
        parent: int | None = None,
        data: DataSpan = DataSpan(),
        created: float | None = None,
        alias: str | None = STABLE,
        reason: str = "",
        by: str = "trainer",
        evidence: Mapping[str, float] = {},
        share: float = 0.0,
        also: Mapping[str, bytes] = {},
    ) -> Manifest:
        """Publishes a policy as the next version of a model.

        :param policy: What plays.
        :param model: The model's name.
        :param algorithm: What trained it, for the manifest and the card.
        :param metrics: Numbers that say how good it is.
        :param config: Hyperparameters.
        :param parent: The version that it was trained on from.
        :param data: The experience that it was trained on.
        :param created: When, in seconds since 1970. None: now.
        :param alias: The alias to move there. `stable`: players get it at once; where that is pinned, it becomes the
            `candidate`, which the manifest's `alias` names. None: no alias is moved.
        :param reason: Why, in a sentence for people.
        :param by: Who: trainer, person, …
        :param evidence: The numbers behind the reason.
        :param share: Of a candidate: in which share of the episodes it plays.
        :param also: Further files of the version, such as the policy in other formats, by name.
        :returns: The manifest, with the version's number.
        :raises SparringError: the policy has NaN or infinite parameters.
        """
        game = policy.game.name
        folder = folder_of(game, model)
        if (why := policy.problem()) is not None:
            raise SparringError(f"not published: {why}. Learning diverged: lower its rate, or go back to a checkpoint")
        files = {name: data for form in FORMS for name, data in formats.render(form, policy, "policy").items()}
        if clash := sorted(also.keys() & {*files, "card.md", "manifest.json"}):
            raise InputError(f"{', '.join(clash)} is a version's own file: give yours another name")
        _check_playable(policy, files["policy.onnx"])
        if alias is not None and check_alias(alias) == STABLE and self._pinned(game, model):
            alias = CANDIDATE
        manifest = Manifest(
            game=policy.game,
            model=model,
            version=0,  # until it is claimed
            created=time.time() if created is None else created,
            algorithm=algorithm,
            files={},
            metrics={name: float(value) for name, value in metrics.items()},
            config=dict(config),
            parent=parent,
            data=data,
            alias=alias,
        )
        _check_round_trip(manifest)
        manifest, mark = self._write(folder, manifest, policy, files | dict(also))
        if alias is not None:
            when, numbers = time.time(), dict(evidence)
            move = Move(0, alias, manifest.version, None, when, by, reason, numbers, False, share, mark)
            self._point(game, model, move)
        return manifest

    def _write(self, folder: str, manifest: Manifest, policy: Policy, files: dict[str, bytes]) -> tuple[Manifest, str]:
        """The files of the next version, the manifest last: a version is there once it is. With the manifest's hash."""
        version = self._claim(folder, files["policy.onnx"])
        manifest = msgspec.structs.replace(manifest, version=version)
        files["card.md"] = card(manifest, policy).encode()
        for name in files.keys() - {"policy.onnx"}:
            self._create(f"{folder}/{version}/{name}", files[name])
        self._backend.sync(f"{folder}/{version}", *files)
        sums = {name: FileInfo(sha256_of(content), len(content)) for name, content in files.items()}
        manifest = msgspec.structs.replace(manifest, files=sums)
        text = msgspec.json.format(msgspec.json.encode(manifest))
        self._create(f"{folder}/{version}/manifest.json", text)
        self._backend.sync(f"{folder}/{version}", "manifest.json")
        return manifest, sha256_of(text)

    def retire(self, game: str, model: str, versions: Iterable[int]) -> list[int]:
        """Removes the files of old versions; their numbers stay used.

        :param versions: Which. One that an alias names, or one of the last ten moves of `stable`, is left where it is.
        :returns: Those that are gone.
        """
        folder = folder_of(game, model)
        moves = [move for move in self.moves(game, model, limit=1000) if move.alias == STABLE][:KEPT_MOVES]
        kept = {alias.version for alias in self.aliases(game, model).values()}
        kept |= {number for move in moves for number in (move.version, move.previous) if number is not None}
        gone = sorted(set(versions) & set(self.versions(game, model)) - kept)
        for version in gone:
            place = f"{folder}/{version}"
            with self._explained(f"delete {place} in"):
                files = sorted(self._backend.list(place), key=lambda path: not path.endswith("/manifest.json"))
                if version == max(int(name) for name in self._backend.folders(folder) if VERSION.fullmatch(name)):
                    self._put(f"{place}/deleted", b"")  # the highest number stays claimed
                self._backend.delete([path for path in files if not path.endswith("/deleted")])
        if gone:
            self._backend.sync(folder)
        return gone

    def stop_ab(
        self,
        game: str,
        keep: str | None = None,
        *,
        results: AbResults | None = None,
        reason: str = "",
        by: str,
        expected: str | None = None,
    ) -> AbTest:
        """Ends the A/B test that runs. All players get `bot` again, which is what the trainer goes on with.

        :param game: The game's name.
        :param keep: The model that they shall get: its version becomes the next one of `bot`, and `stable`.
        :param results: How the test stood, for the record.
        :param reason: Why, in a sentence for people.
        :param by: Who ends it.
        :param expected: Only if it is the test of this id.
        :raises NotRunning: there is none.
        :raises NotPublished: `keep` is none of its models.
        :raises AbRunning: players would be left without a bot, or another test runs than expected.
        """
        test = self.ab(game).running
        if test is not None and expected not in (None, test.id):
            raise AbRunning(f"another A/B test of {game} runs meanwhile ({words(test)}): look at that one first")
        if test is not None and keep is not None and keep not in test.shares:
            raise NotPublished(f"{keep[:100]!r} is none of the test's models, which are {', '.join(test.shares)}")
        if test is not None and keep is None and self.latest(game, DEFAULT_MODEL) is None:
            raise AbRunning(
                f"{game} has no version of {DEFAULT_MODEL!r}, so its players would get none: "
                f"keep one of {', '.join(test.shares)}"
            )
        if test is not None and keep not in (None, DEFAULT_MODEL):
            assert keep is not None
            self._keep(game, keep, reason or (results.verdict if results else "") or "an A/B test ended", by)
        return self.end_ab(game, kept=keep, results=results, expected=test.id if test else None)

    def _keep(self, game: str, model: str, reason: str, by: str) -> None:
        """A model's version for players as the next version of `bot`, also where that is pinned: a person decides."""
        if (kept := self.latest(game, model)) is None:
            raise NotPublished(self.no_model(game, model))
        stable = self.latest(game, DEFAULT_MODEL)
        published = self.publish(
            self.policy(game, model, kept.version),
            algorithm=kept.algorithm,
            metrics=kept.metrics,
            config=kept.config,
            parent=stable.version if stable else None,
            data=kept.data,
            alias=None,
        )
        why = f"kept version {kept.version} of {model!r}: {reason}"
        self.move(game, DEFAULT_MODEL, STABLE, published.version, reason=why, by=by)

    # Writing

    def _pinned(self, game: str, model: str) -> bool:
        stable = self._target(game, model, STABLE).alias
        return stable is not None and stable.pinned

    def _point(self, game: str, model: str, move: Move) -> None:
        """Moves an alias to a version that was just published, unless a later one is there already."""

        def draft(now: Alias | None, pointer: Pointer | None) -> Move:
            if move.alias == STABLE and now is not None and now.pinned:
                raise Pinned
            if pointer is not None and (pointer.version or 0) > (move.version or 0):
                raise Overtaken
            return msgspec.structs.replace(move, previous=now.version if now else None)

        try:
            self._swap(game, model, move.alias, draft)
        except Pinned:
            self._point(game, model, msgspec.structs.replace(move, alias=CANDIDATE))
        except Overtaken:
            return

    def _claim(self, folder: str, content: bytes) -> int:
        with self._explained(f"list {folder} in"):
            used = [int(name) for name in self._backend.folders(folder) if VERSION.fullmatch(name)]
        pointer = pointer_of(self._get(f"{folder}/latest.json"))
        version = max([*used, (pointer.version or 0) if pointer else 0]) + 1
        while True:
            try:
                self._put(f"{folder}/{version}/policy.onnx", content, absent=True)
            except Conflict:
                version += 1  # another publisher was quicker
            else:
                return version

    def delete_game(self, game: str) -> int:
        """All that was published of a game: how many versions. Their numbers are not given out again: whoever kept a
        version, which they may for ever, must not take another one for it."""
        found: dict[str, list[tuple[str, int]]] = {}  # by model: paths and versions
        with self._explained(f"list {game} in"):
            for ours in filter(None, map(OURS.fullmatch, self._backend.list(folder_of(game)))):
                found.setdefault(ours[1], []).append((ours[0], int(ours[2] or 0)))
        for model, paths in found.items():
            self._erase(folder_of(game, model), dict(paths))
            self._forget(game, model)
        if self._get(path := path_of(game)) is not None:
            with self._explained(f"delete {path} in"):
                self._backend.delete([path])
        return sum(MANIFEST.fullmatch(path) is not None for paths in found.values() for path, _ in paths)

    def _erase(self, folder: str, paths: dict[str, int]) -> None:
        """What makes a version exist goes first; the highest number stays claimed."""
        pointer = pointer_of(self._get(f"{folder}/latest.json"))
        last = max(*paths.values(), (pointer.version or 0) if pointer else 0)
        claim = f"{folder}/{last}/deleted"
        gone = sorted(paths.keys() - {claim}, key=lambda path: not path.endswith(".json"))
        if not gone:
            return
        if last:
            self._put(claim, b"")
        with self._explained(f"delete {folder} in"):
            self._backend.delete(gone)
        self._backend.sync(f"{folder}/{last}" if last else folder)


def _check_playable(policy: Policy, data: bytes) -> None:
    """Before anything is written: clients refuse what layers from outside may put into a graph."""
    try:
        onnx_check.check(data)
    except InputError as error:
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in policy.layers))
        raise InputError(
            f"not published, as no bot would load it: {error.__cause__ or error} (its layers: {kinds}). "
            f"Bots know the operators {', '.join(onnx_check.OPERATORS)}"
        ) from error


def _check_round_trip(manifest: Manifest) -> None:
    """Before anything is written: what is published can be read back as it was meant."""
    for name, value in manifest.metrics.items():
        if not math.isfinite(value):
            raise InputError(f"metric {name} is {value}: leave it out, a manifest has finite numbers only")
    try:
        again = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    except (TypeError, msgspec.DecodeError) as error:
        raise InputError(f"a manifest cannot hold this: {error}") from error
    if again != manifest:
        wrong = [f for f in manifest.__struct_fields__ if getattr(again, f) != getattr(manifest, f)]
        raise InputError(f"a manifest cannot hold this {' and '.join(wrong)}: use finite numbers, text and flat lists")
