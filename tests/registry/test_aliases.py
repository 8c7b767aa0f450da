"""Aliases: what players get moves, also back, and every move says why; also after kills, races and lost bytes."""

import hashlib
import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from killed_writer import KILLED_WRITER

from sparring.errors import InputError
from sparring.networks.policy import Policy
from sparring.registry.manifest import Pointer
from sparring.registry.registry import Moved, NotPublished, Pinned, Registry

NAME = "CartPole-v1"
MODEL = Path("games/CartPole-v1/models/bot")


def publish(registry: Registry, policy: Policy, times: int = 1, **options: Any) -> None:
    for _ in range(times):
        registry.publish(policy, algorithm="dqn", **options)


def stable(registry: Registry) -> int | None:
    latest = registry.latest(NAME)
    return None if latest is None else latest.version


def test_a_candidate_is_not_what_players_get(anywhere: Registry, policy: Policy) -> None:
    publish(anywhere, policy, alias="candidate", share=0.5)
    assert anywhere.latest(NAME) is None  # also the very first
    serving = anywhere.serving(NAME)  # compared with play at random
    assert (serving.stable, serving.candidate, serving.share) == (None, anywhere.manifest(NAME, "bot", 1), 0.5)
    publish(anywhere, policy, alias=None)
    assert anywhere.latest(NAME) is None
    publish(anywhere, policy, reason="first", by="person")
    publish(anywhere, policy, alias="candidate", share=0.1, reason="may be better", evidence={"difference": 3.0})
    assert stable(anywhere) == 3
    aliases = anywhere.aliases(NAME)
    assert list(aliases) == ["stable", "candidate"]
    assert (aliases["stable"].version, aliases["stable"].reason, aliases["stable"].by) == (3, "first", "person")
    candidate = aliases["candidate"]
    assert (candidate.version, candidate.share, candidate.evidence) == (4, 0.1, {"difference": 3.0})
    serving = anywhere.serving(NAME)
    assert serving.stable == anywhere.manifest(NAME, "bot", 3)
    assert (serving.candidate, serving.share) == (anywhere.manifest(NAME, "bot", 4), 0.1)


def test_promote_and_roll_back(anywhere: Registry, policy: Policy) -> None:
    publish(anywhere, policy)
    publish(anywhere, policy, alias="candidate", share=0.1)
    move = anywhere.move(NAME, "bot", "stable", 2, reason="better: +3.0", by="trainer", evidence={"low": 1.0})
    assert (move.previous, move.version, move.evidence) == (1, 2, {"low": 1.0})
    assert stable(anywhere) == 2
    assert "candidate" not in anywhere.aliases(NAME)  # it is promoted
    back = anywhere.rollback(NAME, reason="it collapsed", by="trainer")
    assert (back.previous, back.version, back.reason) == (2, 1, "it collapsed")
    assert stable(anywhere) == 1
    assert anywhere.rollback(NAME, by="person").version == 2  # and back again
    moves = [(m.alias, m.previous, m.version) for m in anywhere.moves(NAME)]
    assert moves == [
        ("stable", 1, 2),
        ("stable", 2, 1),
        ("candidate", 2, None),
        ("stable", 1, 2),
        ("candidate", None, 2),
        ("stable", None, 1),
    ]
    assert [m.number for m in anywhere.moves(NAME, limit=2)] == [6, 5]


def test_a_candidate_that_stable_left_is_not_tried_again(anywhere: Registry, policy: Policy) -> None:
    publish(anywhere, policy, 2)
    anywhere.move(NAME, "bot", "candidate", 2, reason="odd, but possible", by="person", share=0.1)
    assert anywhere.serving(NAME).candidate is None
    anywhere.rollback(NAME, by="person")
    assert anywhere.serving(NAME).candidate is None
    assert stable(anywhere) == 1


def test_a_pinned_version_stays(anywhere: Registry, policy: Policy) -> None:
    publish(anywhere, policy, 2)
    assert anywhere.pin(NAME, version=1, reason="the tournament", by="person").pinned
    with pytest.raises(Pinned, match="pinned to version 1"):
        anywhere.move(NAME, "bot", "stable", 2, reason="better", by="trainer")
    with pytest.raises(Pinned):
        anywhere.rollback(NAME, by="trainer")
    published = anywhere.publish(policy, algorithm="dqn")
    assert (stable(anywhere), published.alias) == (1, "candidate")
    assert anywhere.aliases(NAME)["candidate"].version == 3
    assert anywhere.move(NAME, "bot", "stable", 2, reason="I know", by="person").pinned  # and still is
    anywhere.pin(NAME, pinned=False, by="person")
    assert anywhere.aliases(NAME)["stable"].reason == "unpinned; I know"  # why players have it is not forgotten
    publish(anywhere, policy)
    assert stable(anywhere) == 4


def test_aliases_of_ones_own(anywhere: Registry, policy: Policy) -> None:
    publish(anywhere, policy, 3)
    anywhere.move(NAME, "bot", "easy", 1, reason="for beginners", by="person")
    found = anywhere.named(NAME, "bot", "easy")
    assert found is not None
    assert found.version == 1
    assert anywhere.named(NAME, "bot", "hard") is None
    anywhere.move(NAME, "bot", "easy", None, reason="", by="person")
    assert anywhere.named(NAME, "bot", "easy") is None
    assert list(anywhere.aliases(NAME)) == ["stable"]
    anywhere.move(NAME, "bot", "easy", 2, reason="", by="person", expected=None)
    assert anywhere.delete_game(NAME) == 3
    assert (anywhere.aliases(NAME), anywhere.moves(NAME), anywhere.named(NAME, "bot", "easy")) == ({}, [], None)


def test_there_are_not_too_many(registry: Registry, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparring.registry.aliases.MAX_ALIASES", 2)
    publish(registry, policy, 2)
    for version, alias in ((1, "one"), (1, "two"), (None, "two"), (1, "two"), (2, "one"), (2, "candidate")):
        registry.move(NAME, "bot", alias, version, reason="", by="person")
    with pytest.raises(InputError, match="takes no more"):
        registry.move(NAME, "bot", "three", 1, reason="", by="person")


def test_what_cannot_be_moved(anywhere: Registry, policy: Policy) -> None:
    with pytest.raises(NotPublished, match="it has none"):
        anywhere.move(NAME, "bot", "stable", 1, reason="", by="person")
    for call in (anywhere.rollback, anywhere.pin):
        with pytest.raises(NotPublished, match="nothing to"):
            call(NAME, by="person")
    publish(anywhere, policy)
    with pytest.raises(NotPublished, match="no other version before"):
        anywhere.rollback(NAME, by="person")
    publish(anywhere, policy, 2)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (NotPublished, "has no whole version 9 .* it has 1–3", ("stable", 9), {}),
        (InputError, "another version", ("stable", None), {}),
        (NotPublished, "no alias 'mine'", ("mine", None), {}),
        (InputError, "alias name", ("../x", 1), {}),
        (InputError, "from 0 to 1", ("candidate", 1), {"share": 2.0}),
        (InputError, "low of a move is nan", ("stable", 1), {"evidence": {"low": float("nan")}}),
        (Moved, "at version 3, not at version 2", ("stable", 1), {"expected": 2}),
        (Moved, "at version 3, not nowhere", ("stable", 1), {"expected": None}),
    ]
    for kind, words, args, options in wrong:
        with pytest.raises(kind, match=words):
            anywhere.move(NAME, "bot", *args, **{"reason": "", "by": "person", **options})
    assert stable(anywhere) == 3
    assert len(anywhere.moves(NAME)) == 3


def test_two_movers_at_once(anywhere: Registry, policy: Policy) -> None:
    """Each says where the alias is expected: as many succeed as the chain of moves has links."""
    publish(anywhere, policy, 2)
    won: list[int] = []

    def mover(n: int) -> None:
        for _ in range(10):
            at = stable(anywhere)
            assert at is not None
            try:
                move = anywhere.move(NAME, "bot", "stable", 3 - at, reason=f"by {n}", by="person", expected=at)
            except Moved:
                continue
            won.append(move.number)

    threads = [threading.Thread(target=mover, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moves = [m for m in anywhere.moves(NAME) if m.reason]
    assert sorted(won) == sorted(m.number for m in moves)
    for later, earlier in itertools.pairwise(moves):
        assert later.previous == earlier.version
    assert moves[0].version == stable(anywhere)


def test_who_comes_second_in_a_bucket_looks_again(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody rolls back between the trainer's look and its write: the promotion is neither done nor reported."""
    registry = Registry("memory:///")
    publish(registry, policy, 3)
    put, raced = obstore.put, []

    def racing(store: Any, path: str, data: bytes, **options: Any) -> Any:
        if path.endswith("latest.json") and not raced:
            raced.append(path)
            registry.rollback(NAME, by="person", reason="no!")
        return put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put", racing)
    with pytest.raises(Moved, match="at version 2"):
        registry.move(NAME, "bot", "stable", 1, reason="mine", by="trainer", expected=3)
    assert stable(registry) == 2
    assert [m.reason for m in registry.moves(NAME)] == ["no!", "", "", ""]


def test_a_move_whose_answer_was_lost(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry("memory:///")
    publish(registry, policy, 2)
    put = obstore.put

    def twice(store: Any, path: str, data: bytes, **options: Any) -> Any:
        put(store, path, data, **options)
        return put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put", twice)
    assert registry.rollback(NAME, by="person").number == 3
    assert [m.version for m in registry.moves(NAME)] == [1, 2, 1]


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", None])
def test_a_torn_pointer_after_a_rollback(registry: Registry, policy: Policy, tmp_path: Path, damage: bytes) -> None:
    """The journal remembers that version 3 was taken back, that 4 is a candidate only, and the pin."""
    publish(registry, policy, 3)
    registry.rollback(NAME, by="person")
    registry.pin(NAME, by="person")
    publish(registry, policy, alias="candidate")
    path = tmp_path / MODEL / "latest.json"
    path.unlink() if damage is None else path.write_bytes(damage)
    for reader in (registry, Registry(tmp_path)):
        assert stable(reader) == 2
        assert reader.aliases(NAME)["stable"].pinned
    assert registry.move(NAME, "bot", "stable", 4, reason="", by="person").previous == 2
    assert [m.version for m in registry.moves(NAME) if m.alias == "stable"] == [4, 2, 2, 3, 2, 1]


def test_a_torn_entry_of_the_journal_is_passed_over(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    publish(registry, policy, 3)
    (tmp_path / MODEL / "moves/3.json").write_bytes(b"{")
    (tmp_path / MODEL / "latest.json").write_bytes(b"")
    assert stable(Registry(tmp_path)) == 2
    assert [m.number for m in registry.moves(NAME)] == [2, 1]
    publish(registry, policy)
    assert stable(Registry(tmp_path)) == 4


KILLED = f"""{KILLED_WRITER}
from sparring.registry.registry import Registry
Registry(sys.argv[1]).move("CartPole-v1", "bot", "stable", 2, reason="promoted", by="trainer")
"""


@pytest.mark.real
def test_killed_before_each_write_of_a_promotion(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    """The journal, latest.json, then the journal and the candidate's pointer."""
    publish(registry, policy)
    publish(registry, policy, alias="candidate", share=0.5)
    for writes in range(4):
        if writes > 1:
            registry.move(NAME, "bot", "stable", 1, reason="again", by="person")
            registry.move(NAME, "bot", "candidate", 2, reason="again", by="person", share=0.5)
        before = len(registry.moves(NAME))
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(writes)], check=False)
        assert done.returncode == -signal.SIGKILL
        reader = Registry(tmp_path)
        promoted = writes >= 2
        assert stable(reader) == (2 if promoted else 1)
        assert len(reader.moves(NAME)) == before + promoted  # what was not done is not reported
        assert reader.serving(NAME).share == (0.0 if promoted else 0.5)


def test_the_journal_has_a_bound(anywhere: Registry, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparring.registry.aliases.KEPT_MOVES", 4)
    monkeypatch.setattr("sparring.registry.aliases.FORGOTTEN", 2)
    publish(anywhere, policy, 2)
    anywhere.move(NAME, "bot", "easy", 1, reason="", by="person")
    for version in (1, 2, 1, 2, 1, 2, 1):
        anywhere.move(NAME, "bot", "stable", version, reason=f"to {version}", by="person")
    moves = anywhere.moves(NAME)
    assert [m.number for m in moves] == [10, 9, 8, 7, 6, 3]  # 3 brought `easy` where it is
    assert (anywhere.aliases(NAME)["easy"].version, stable(anywhere)) == (1, 1)
    assert anywhere.rollback(NAME, by="person").version == 2


def test_an_older_registry_is_moved_and_rolled_back(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    """Of before there were aliases: manifests and pointers without the new fields, no journal."""
    publish(registry, policy, 3)
    for path in (tmp_path / MODEL / "moves").iterdir():
        path.unlink()
    for version in (1, 2, 3):
        path = tmp_path / MODEL / str(version) / "manifest.json"
        fields = msgspec.json.decode(path.read_bytes())
        del fields["alias"]
        path.write_bytes(msgspec.json.encode(fields))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    pointer = tmp_path / MODEL / "latest.json"
    pointer.write_bytes(msgspec.json.encode({"version": 3, "sha256": sha256}))
    older = Registry(tmp_path)
    assert (stable(older), older.moves(NAME)) == (3, [])
    assert older.aliases(NAME)["stable"].version == 3
    assert older.rollback(NAME, by="person").version == 2
    pointer.write_bytes(b"")
    assert stable(Registry(tmp_path)) == 2
    publish(older, policy)
    assert stable(Registry(tmp_path)) == 4


def test_what_an_older_reader_finds_in_the_pointer(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    class Older(msgspec.Struct):
        version: int
        sha256: str

    publish(registry, policy, 2)
    registry.rollback(NAME, by="person")
    raw = (tmp_path / MODEL / "latest.json").read_bytes()
    assert msgspec.json.decode(raw, type=Older).version == msgspec.json.decode(raw, type=Pointer).version == 1


def test_old_versions_are_retired(anywhere: Registry, policy: Policy) -> None:
    publish(anywhere, policy)
    publish(anywhere, policy, 3, alias="candidate")
    anywhere.move(NAME, "bot", "mine", 2, reason="", by="person")
    publish(anywhere, policy, alias=None)
    assert anywhere.retire(NAME, "bot", range(1, 10)) == [3, 5]  # 1 is stable, 2 mine, 4 the candidate
    assert anywhere.versions(NAME) == [1, 2, 4]
    with pytest.raises(NotPublished):
        anywhere.manifest(NAME, "bot", 5)
    assert anywhere.publish(policy, algorithm="dqn").version == 6  # no number is used twice
    for _ in range(12):
        publish(anywhere, policy)
    assert anywhere.retire(NAME, "bot", anywhere.versions(NAME)) == [1, 6, 7]
    assert stable(anywhere) == 18


def test_aliases_are_cheap_to_ask_for(registry: Registry, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(registry, policy)
    publish(registry, policy, alias="candidate", share=0.5)
    registry.serving(NAME)
    get, reads = obstore.get, []

    def counting(store: Any, path: str) -> Any:
        reads.append(path)
        return get(store, path)

    monkeypatch.setattr(obstore, "get", counting)
    registry.serving(NAME)
    assert reads == [f"{MODEL}/latest.json", f"{MODEL}/aliases/candidate.json"]
