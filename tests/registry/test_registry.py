"""Versions: published once, whole or not at all, found by whoever asks; also after kills, races and lost bytes."""

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import obstore
import onnxruntime
import pytest
from killed_writer import KILLED_WRITER

from sparring.errors import InputError, SparringError
from sparring.export.onnx_check import check
from sparring.export.weights import save
from sparring.games import Box, Dict, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.manifest import DataSpan, flat
from sparring.registry.registry import NotPublished, Registry

FILES = {"policy.onnx", "policy.safetensors", "card.md"}
MODEL = Path("games/CartPole-v1/models/bot")


def test_publish_and_read_back(anywhere: Registry, policy: Policy) -> None:
    assert anywhere.latest("CartPole-v1", "bot") is None
    assert (anywhere.games(), anywhere.models("CartPole-v1"), anywhere.versions("CartPole-v1", "bot")) == ([], [], [])
    first = anywhere.publish(policy, algorithm="dqn", created=1.5)
    second = anywhere.publish(
        policy.explore(0.05),
        algorithm="dqn",
        metrics={"episode/return_mean": np.float32(200)},  # type: ignore[dict-item]  # what a trainer has at hand
        config={"lr": 1e-3, "layers": [64, 64], "double": True, "note": None},
        parent=1,
        data=DataSpan(1, 10, 10, 1000),
    )
    assert (first.version, second.version, first.created) == (1, 2, 1.5)
    assert second.files.keys() == FILES
    assert anywhere.latest("CartPole-v1", "bot") == second
    assert anywhere.manifest("CartPole-v1", "bot", 1) == first
    assert anywhere.versions("CartPole-v1", "bot") == [1, 2]
    assert (anywhere.games(), anywhere.models("CartPole-v1")) == (["CartPole-v1"], ["bot"])
    for name, info in second.files.items():
        data = anywhere.read("CartPole-v1", "bot", 2, name)
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (info.sha256, info.size)
    check(anywhere.read("CartPole-v1", "bot", 2, "policy.onnx"))
    again = anywhere.policy("CartPole-v1", "bot", 2)
    assert again.exploration == 0.05
    np.testing.assert_array_equal(again.params["head.w"], policy.params["head.w"])


def test_layout_is_plain_files(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    manifest = registry.publish(policy, algorithm="dqn")
    assert {p.name for p in (tmp_path / MODEL / "1").iterdir()} == FILES | {"manifest.json"}
    text = (tmp_path / MODEL / "1/manifest.json").read_bytes()
    assert msgspec.json.decode(text, type=type(manifest)) == manifest
    pointer = json.loads((tmp_path / MODEL / "latest.json").read_bytes())
    assert pointer.items() >= {"version": 1, "sha256": hashlib.sha256(text).hexdigest()}.items()


def test_models_are_apart(registry: Registry, policy: Policy) -> None:
    registry.publish(policy, algorithm="dqn")
    registry.publish(policy, model="hard.bot-2", algorithm="dqn")
    registry.publish(policy, algorithm="dqn")
    assert registry.models("CartPole-v1") == ["bot", "hard.bot-2"]
    assert registry.versions("CartPole-v1", "hard.bot-2") == [1]
    latest = registry.latest("CartPole-v1", "hard.bot-2")
    assert latest is not None
    assert (latest.model, latest.version) == ("hard.bot-2", 1)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../x", "a\\b", "/etc", "a\0", "x" * 101, "é", " a"])
def test_names_cannot_leave_the_registry(registry: Registry, policy: Policy, name: str) -> None:
    for call in (
        lambda: registry.latest(name, "bot"),
        lambda: registry.latest("CartPole-v1", name),
        lambda: registry.versions("CartPole-v1", name),
        lambda: registry.models(name),
        lambda: registry.manifest(name, "bot", 1),
        lambda: registry.publish(policy, model=name, algorithm="dqn"),
    ):
        with pytest.raises(InputError, match="name"):
            call()


def test_what_is_not_there(registry: Registry, policy: Policy) -> None:
    registry.publish(policy, algorithm="dqn")
    with pytest.raises(NotPublished, match="no version 7"):
        registry.manifest("CartPole-v1", "bot", 7)
    for name in ("replay.mp4", "../1/policy.onnx", "manifest.json"):
        with pytest.raises(NotPublished, match=r"it has card.md, policy.onnx, policy.safetensors"):
            registry.read("CartPole-v1", "bot", 1, name)
    for version in (0, -1, "1/../1", 1.5, 10**15):
        with pytest.raises(InputError, match="whole number"):
            registry.manifest("CartPole-v1", "bot", version)  # type: ignore[arg-type]  # callers may not be typed


def test_what_cannot_be_published_leaves_nothing(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    diverged = Policy(policy.game, policy.layers, policy.head, policy.params | {"head.b": np.float32([np.nan, 0])})
    wrong: list[tuple[Policy, dict[str, Any], str]] = [
        (diverged, {}, "head.b has NaN"),
        (policy, {"metrics": {"loss": float("nan")}}, "metric loss is nan"),
        (policy, {"config": {"lr": float("inf")}}, "config"),
        (policy, {"config": {"lr": object()}}, "cannot hold"),
        (policy, {"config": {"layers": [[64]]}}, "cannot hold"),
        (policy, {"created": float("nan")}, "cannot hold"),
    ]
    for broken, options, reason in wrong:
        with pytest.raises(SparringError, match=reason):
            registry.publish(broken, algorithm="dqn", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_publisher_killed_half_way_is_never_seen(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    registry.publish(policy, algorithm="dqn")
    (tmp_path / MODEL / "2").mkdir()
    (tmp_path / MODEL / "2/policy.onnx").write_bytes(b"claimed")
    (tmp_path / MODEL / "3").mkdir()
    (tmp_path / MODEL / "3/policy.onnx#1").write_bytes(b"cla")  # obstore's temporary file
    latest = Registry(tmp_path).latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 1
    assert registry.versions("CartPole-v1", "bot") == [1]
    with pytest.raises(NotPublished):
        registry.read("CartPole-v1", "bot", 2, "policy.onnx")
    assert registry.publish(policy, algorithm="dqn").version == 4
    assert registry.versions("CartPole-v1", "bot") == [1, 4]


KILLED = f"""{KILLED_WRITER}
from sparring.export import weights
from sparring.registry.registry import Registry
policy = weights.load(open(sys.argv[3], "rb").read())
Registry(sys.argv[1]).publish(policy, algorithm="dqn")
"""


@pytest.mark.real
def test_killed_before_each_write(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    """policy.onnx, policy.safetensors, card.md, manifest.json, the journal, latest.json: so many writes were done."""
    registry.publish(policy, algorithm="dqn")
    weights = tmp_path / "policy.safetensors"
    weights.write_bytes(registry.read("CartPole-v1", "bot", 1, "policy.safetensors"))
    for writes in range(6):
        before = registry.versions("CartPole-v1", "bot")
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(writes), str(weights)], check=False)
        assert done.returncode == -signal.SIGKILL
        after = registry.versions("CartPole-v1", "bot")
        assert len(after) == len(before) + (writes >= 4)  # the manifest is the fourth
        for version in after:
            registry.policy("CartPole-v1", "bot", version)
        latest = Registry(tmp_path).latest("CartPole-v1", "bot")
        assert latest is not None
        assert latest.version == before[-1]
        published = registry.publish(policy, algorithm="dqn")
        assert published.version > after[-1]
        assert Registry(tmp_path).latest("CartPole-v1", "bot") == published


PUBLISHER = """
import sys
from sparring.export import weights
from sparring.registry.registry import Registry
policy = weights.load(open(sys.argv[2], "rb").read())
registry = Registry(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
    m = registry.publish(policy, algorithm="dqn", metrics={"publisher": float(sys.argv[4]), "i": float(i)})
    latest = registry.latest("CartPole-v1", "bot")
    print(m.version, latest.version, flush=True)
"""


@pytest.mark.real
def test_concurrent_publishers(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    weights = tmp_path / "policy.safetensors"
    weights.write_bytes(save(policy))
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path), str(weights), "12", str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for publisher in publishers:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "ready\n"
    outputs = [None] * len(publishers)

    def talk(n: int) -> None:
        outputs[n] = publishers[n].communicate("go\n", timeout=120)[0]

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(len(publishers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.returncode for p in publishers] == [0] * 4
    taken = []
    for output in outputs:
        rows = [tuple(map(int, line.split())) for line in (output or "").splitlines()]
        assert all(latest >= version for version, latest in rows)  # never behind what was just published
        assert [latest for _, latest in rows] == sorted(latest for _, latest in rows)  # never backwards
        taken += [version for version, _ in rows]
    assert sorted(taken) == list(range(1, 49))
    assert registry.versions("CartPole-v1", "bot") == list(range(1, 49))
    seen = set()
    for version in taken:
        manifest = registry.manifest("CartPole-v1", "bot", version)
        seen.add((manifest.metrics["publisher"], manifest.metrics["i"]))
        for name in manifest.files:
            registry.read("CartPole-v1", "bot", version, name)  # verified against its hash
    assert len(seen) == 48
    latest = registry.latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 48


def test_concurrent_threads_and_readers(anywhere: Registry, policy: Policy) -> None:
    done, seen, failures = threading.Event(), [], []

    def publish() -> None:
        for _ in range(5):
            anywhere.publish(policy, algorithm="dqn")

    def read() -> None:
        while not done.is_set():
            latest = anywhere.latest("CartPole-v1", "bot")
            seen.append(latest.version if latest else 0)
            if latest is not None:
                try:
                    anywhere.policy("CartPole-v1", "bot", latest.version)
                except SparringError as error:
                    failures.append(error)

    publishers = [threading.Thread(target=publish) for _ in range(4)]
    reader = threading.Thread(target=read)
    for thread in (reader, *publishers):
        thread.start()
    for thread in publishers:
        thread.join()
    done.set()
    reader.join()
    assert failures == []
    assert seen == sorted(seen)
    assert anywhere.versions("CartPole-v1", "bot") == list(range(1, 21))
    latest = anywhere.latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 20


def test_latest_never_moves_backwards(anywhere: Registry, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow publisher of version 1 comes to `latest.json` after version 2 did."""
    point = Registry._point
    slow: list[Any] = []
    monkeypatch.setattr(Registry, "_point", lambda *args: slow.append(args))
    anywhere.publish(policy, algorithm="dqn")
    monkeypatch.setattr(Registry, "_point", point)
    anywhere.publish(policy, algorithm="dqn")
    point(*slow[0])
    latest = anywhere.latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 2


def test_a_bucket_pointer_moved_in_between_is_read_again(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two publishers, one conditional write: the loser looks again instead of overwriting."""
    registry = Registry("memory:///")
    registry.publish(policy, algorithm="dqn")
    put, raced = obstore.put, []

    def racing(store: Any, path: str, data: bytes, **options: Any) -> Any:
        if path.endswith("latest.json") and not raced:
            raced.append(options["mode"])
            put(store, path, msgspec.json.encode({"version": 9, "sha256": "0"}))
        return put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put", racing)
    registry.publish(policy, algorithm="dqn")
    assert "e_tag" in raced[0]
    assert json.loads(registry._get(f"{MODEL}/latest.json") or b"")["version"] == 9


def test_latest_is_where_its_pointer_is(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    """Without a pointer the journal decides; with one, the pointer does, also where that is a step back."""
    registry.publish(policy, algorithm="dqn")
    path = tmp_path / MODEL / "latest.json"
    first = path.read_bytes()
    second = registry.publish(policy, algorithm="dqn")
    path.unlink()
    reader = Registry(tmp_path)
    assert reader.latest("CartPole-v1", "bot") == second
    path.write_bytes(first)
    latest = reader.latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "random", "dangling", "wrong hash", "text", "negative"])
def test_latest_without_its_pointer(registry: Registry, policy: Policy, tmp_path: Path, damage: str) -> None:
    for _ in range(3):
        registry.publish(policy, algorithm="dqn")
    path = tmp_path / MODEL / "latest.json"
    contents = {
        "empty": b"",
        "random": b"\xff\xfe\x00garbage",
        "dangling": b'{"version": 8, "sha256": "00"}',
        "wrong hash": b'{"version": 3, "sha256": "00"}',
        "text": b'{"version": "../../x", "sha256": "00"}',
        "negative": b'{"version": -3, "sha256": "00"}',
    }
    path.unlink() if damage == "missing" else path.write_bytes(contents[damage])
    for reader in (registry, Registry(tmp_path)):
        for _ in range(2):
            latest = reader.latest("CartPole-v1", "bot")
            assert latest is not None
            assert latest.version == 3
    published = registry.publish(policy, algorithm="dqn")
    assert published.version == (9 if damage == "dangling" else 4)
    assert registry.latest("CartPole-v1", "bot") == published


@pytest.mark.parametrize("name", ["policy.onnx", "policy.safetensors", "card.md", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "zeros", "gone"])
def test_lost_bytes_are_noticed(
    registry: Registry, policy: Policy, tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a power loss does to files that were not on disk yet: `latest` is then the version before."""
    for _ in range(2):
        registry.publish(policy, algorithm="dqn")
    path = tmp_path / MODEL / "2" / name
    size = path.stat().st_size
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"truncated": path.read_bytes()[: size // 2], "empty": b"", "zeros": bytes(size)}[damage])
    with caplog.at_level(logging.WARNING):
        latest = Registry(tmp_path).latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 1
    assert "passing over version 2" in caplog.text
    with pytest.raises(SparringError, match=r"damaged|missing|no version"):
        registry.read("CartPole-v1", "bot", 2, "policy.onnx" if name == "manifest.json" else name)
    assert registry.publish(policy, algorithm="dqn").version == 3  # the number is not used again
    latest = registry.latest("CartPole-v1", "bot")
    assert latest is not None
    assert latest.version == 3


def test_a_manifest_in_the_wrong_place_is_refused(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    for _ in range(2):
        registry.publish(policy, algorithm="dqn")
    (tmp_path / MODEL / "2/manifest.json").write_bytes((tmp_path / MODEL / "1/manifest.json").read_bytes())
    with pytest.raises(SparringError, match="another version's"):
        registry.manifest("CartPole-v1", "bot", 2)


def test_latest_is_cheap_and_notices_other_publishers(
    registry: Registry, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Registry(tmp_path)
    registry.publish(policy, algorithm="dqn")
    reader.latest("CartPole-v1", "bot")
    get, reads = obstore.get, []

    def counting(store: Any, path: str) -> Any:
        reads.append(path)
        return get(store, path)

    monkeypatch.setattr(obstore, "get", counting)
    assert reader.latest("CartPole-v1", "bot") == reader.latest("CartPole-v1", "bot")
    assert reads == [f"{MODEL}/latest.json"] * 2
    published = registry.publish(policy, algorithm="dqn")
    assert reader.latest("CartPole-v1", "bot") == published


def test_every_file_is_on_disk_before_the_manifest_appears(
    registry: Registry, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, fsync, synced = obstore.put, os.fsync, set()
    at_manifest: list[set[Path]] = []

    def watching(store: Any, path: str, data: bytes, **options: Any) -> Any:
        if path.endswith("manifest.json"):
            at_manifest.append(set(synced))
        return put(store, path, data, **options)

    def noting(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(obstore, "put", watching)
    monkeypatch.setattr(os, "fsync", noting)
    registry.publish(policy, algorithm="dqn")
    folder = tmp_path / MODEL / "1"
    needed = {folder / name for name in FILES} | {folder, *folder.parents[: len(MODEL.parts) + 1]}
    assert needed <= at_manifest[0]
    assert {folder / "manifest.json", tmp_path / MODEL / "latest.json"} <= synced


def test_the_card_shows_how_to_load_it(
    registry: Registry, random_policy: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Dict({"at": Box((2,), low=0.0, high=1.0), "weapon": Discrete(3)})
    policy = random_policy(Game("Arena", space, Discrete(5)), (Dense(8),), QValues())
    registry.publish(policy, algorithm="dqn", metrics={"episode/return_mean": 12.5}, data=DataSpan(3, 9, 6, 1234))
    text = (tmp_path / "games/Arena/models/bot/1/card.md").read_text()
    for shown in ("# Arena · bot · version 1", "dqn", "12.5", "1,234 steps", "Dense 8 relu", policy.game.schema):
        assert shown in text
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) == 3
    monkeypatch.chdir(tmp_path / "games/Arena/models/bot/1")
    names = {"at": np.zeros((2, 2), np.float32), "weapon": np.zeros(2, np.int32)}
    onnxruntime.set_default_logger_severity(3)  # of the whole process
    try:
        exec(found[1], names)
    finally:
        onnxruntime.set_default_logger_severity(2)  # as it begins
    assert names["action"].shape == (2,)


def test_where_no_registry_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for location in (tmp_path / "file", tmp_path / "file/below", "gopher://x"):
        with pytest.raises(InputError, match="no registry can be at"):
            Registry(location)


def test_a_store_that_fails_is_not_taken_for_an_empty_one(
    registry: Registry, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.publish(policy, algorithm="dqn")

    get = obstore.get

    def failing(*args: Any, **options: Any) -> Any:
        raise obstore.exceptions.GenericError("no route to host\n\nDebug source: pages of it")

    monkeypatch.setattr(
        obstore, "get", lambda store, path: (get if path.endswith("latest.json") else failing)(store, path)
    )
    with pytest.raises(SparringError, match="no route to host"):
        registry.latest("CartPole-v1", "bot")
    monkeypatch.setattr(obstore, "get", failing)
    with pytest.raises(SparringError, match=r"cannot read .*: no route to host$"):
        registry.latest("CartPole-v1", "bot")
    monkeypatch.setattr(obstore, "put", failing)
    with pytest.raises(SparringError, match="cannot"):
        registry.publish(policy, algorithm="dqn")


def test_a_deleted_game_is_gone_and_its_numbers_are_not_given_out_again(
    anywhere: Registry, policy: Policy, random_policy: Callable[..., Policy]
) -> None:
    other = random_policy(Game("CartPole-v10", Box((4,)), Discrete(2)), (Dense(8),), QValues())
    for _ in range(3):
        anywhere.publish(policy, algorithm="dqn")
    anywhere.publish(policy, model="second", algorithm="dqn")
    kept = anywhere.publish(other, algorithm="dqn")
    assert anywhere.latest("CartPole-v1") is not None
    assert anywhere.delete_game("CartPole-v1") == 4
    assert anywhere.games() == ["CartPole-v10"]
    assert anywhere.latest("CartPole-v1") is None
    assert (anywhere.models("CartPole-v1"), anywhere.versions("CartPole-v1")) == ([], [])
    with pytest.raises(NotPublished):
        anywhere.manifest("CartPole-v1", "bot", 3)
    assert anywhere.latest("CartPole-v10") == kept
    assert anywhere.delete_game("CartPole-v1") == anywhere.delete_game("never-there") == 0
    again = anywhere.publish(policy, algorithm="dqn")
    assert again.version == 4
    assert anywhere.latest("CartPole-v1") == again
    assert anywhere.delete_game("CartPole-v1") == 1
    assert anywhere.publish(policy, algorithm="dqn").version == 5


def test_little_is_left_of_a_deleted_game(registry: Registry, policy: Policy, tmp_path: Path) -> None:
    for _ in range(3):
        registry.publish(policy, algorithm="dqn")
    (tmp_path / MODEL / "notes.txt").write_text("somebody's own")
    registry.delete_game("CartPole-v1")
    left = [path for path in (tmp_path / MODEL).rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / MODEL)) for path in left} == {"3/deleted", "notes.txt"}


def test_another_process_that_knew_a_deleted_version_does_not_serve_it(
    registry: Registry, policy: Policy, tmp_path: Path
) -> None:
    other = Registry(tmp_path)
    for _ in range(3):
        registry.publish(policy, algorithm="dqn")
    assert other.latest("CartPole-v1") is not None
    registry.delete_game("CartPole-v1")
    assert other.latest("CartPole-v1") is None
    registry.publish(policy, algorithm="dqn")
    latest = other.latest("CartPole-v1")
    assert latest is not None
    assert latest.version == 4


def test_hyperparameters_are_plain_values_by_their_paths(tmp_path: Path, policy: Policy) -> None:
    """Not strings of JSON, and as flat as clients of 0.1 read them."""
    deep = {"lr": 0.5, "lr_final": None, "betas": (0.9, 0.99), "flags": [True, None], "layers": [{"units": 64}, {}]}
    found = flat({**deep, "network": {"head": {"kind": "q"}}})
    assert found == {
        "lr": 0.5,
        "lr_final": None,
        "betas": [0.9, 0.99],
        "flags.0": True,
        "flags.1": None,
        "layers.0.units": 64,
        "network.head.kind": "q",
    }

    class Older(msgspec.Struct):
        config: dict[str, str | int | float | bool | list[str | int | float] | None]

    registry = Registry(tmp_path)
    version = registry.publish(policy, algorithm="dqn", config=found).version
    text = (tmp_path / f"games/{policy.game.name}/models/bot/{version}/manifest.json").read_bytes()
    assert msgspec.json.decode(text, type=Older).config == found
    assert registry.manifest(policy.game.name, "bot", version).config == found
