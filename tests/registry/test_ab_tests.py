"""A/B tests in the registry: started, ended, kept; and who gets what."""

import contextlib
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import obstore
import pytest

from sparring.errors import InputError
from sparring.networks.policy import Policy
from sparring.registry.ab import AbResults, AbTest
from sparring.registry.registry import AbRunning, NotPublished, NotRunning, Registry

NAME = "CartPole-v1"
HALVES = {"bot": 0.5, "careful": 0.5}


@pytest.fixture
def registry(anywhere: Registry, policy: Policy) -> Registry:
    """With two models."""
    anywhere.publish(policy, algorithm="dqn")
    anywhere.publish(policy, algorithm="ppo", model="careful", metrics={"return/mean": 7.0})
    return anywhere


def test_players_keep_their_model_and_the_shares_are_kept_to() -> None:
    test = AbTest("a1", {"bot": 0.2, "careful": 0.3, "wild": 0.5}, 0.0)
    found = Counter(test.model(f"player-{n}") for n in range(20_000))
    assert {model: pytest.approx(n / 20_000, abs=0.02) for model, n in found.items()} == test.shares
    assert [test.model("anna"), test.model("finn"), test.model("gus")] == ["wild", "careful", "wild"]  # for ever
    shuffled = AbTest("a1", {"wild": 0.5, "careful": 0.3, "bot": 0.2}, 9.0)
    assert all(test.model(f"{n}") == shuffled.model(f"{n}") for n in range(100))
    other = AbTest("a2", test.shares, 0.0)
    assert any(test.model(f"{n}") != other.model(f"{n}") for n in range(100))


def test_a_test_is_started_and_ended(registry: Registry) -> None:
    assert registry.ab(NAME).running is None
    started = registry.start_ab(NAME, HALVES, reason="is careful better?", by="person", cursor=5)
    assert registry.ab(NAME).running == started
    assert (started.shares, started.cursor, started.by, started.ended) == (HALVES, 5, "person", None)
    with pytest.raises(AbRunning, match=r"bot 0\.5, careful 0\.5.*sparring ab stop CartPole-v1"):
        registry.start_ab(NAME, HALVES, by="person")
    results = AbResults([], 0.95, "no clear difference")
    ended = registry.stop_ab(NAME, results=results, by="person")
    assert (ended.id, ended.kept, ended.results) == (started.id, None, results)
    assert registry.ab(NAME) == type(registry.ab(NAME))(None, [ended])
    with pytest.raises(NotRunning, match="sparring ab start"):
        registry.stop_ab(NAME, by="person")
    assert registry.start_ab(NAME, HALVES, by="person").id != started.id
    assert registry.ab(NAME).ended == [ended]
    assert registry.delete_game(NAME) == 2
    assert registry.ab(NAME) == type(registry.ab(NAME))()


def test_a_kept_model_becomes_the_bots_next_version(registry: Registry) -> None:
    registry.pin(NAME, by="person")
    registry.start_ab(NAME, HALVES, by="person")
    assert registry.stop_ab(NAME, "careful", reason="people like it", by="person").kept == "careful"
    stable = registry.latest(NAME)
    assert stable is not None
    assert (stable.version, stable.algorithm, stable.parent, stable.metrics) == (2, "ppo", 1, {"return/mean": 7.0})
    assert registry.moves(NAME)[0].reason == "kept version 1 of 'careful': people like it"
    assert registry.read(NAME, "bot", 2, "policy.onnx") == registry.read(NAME, "careful", 1, "policy.onnx")
    registry.start_ab(NAME, HALVES, by="person")
    registry.stop_ab(NAME, "bot", by="person")
    assert registry.versions(NAME) == [1, 2]  # it is what they get anyway


def test_players_are_not_left_without_a_bot(policy: Policy, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for model in ("bold", "careful"):
        registry.publish(policy, algorithm="dqn", model=model)
    registry.start_ab(NAME, {"bold": 0.5, "careful": 0.5}, by="person")
    with pytest.raises(AbRunning, match="keep one of bold, careful"):
        registry.stop_ab(NAME, by="person")
    registry.stop_ab(NAME, "bold", by="person")
    assert registry.versions(NAME) == [1]


@pytest.mark.parametrize(
    ("kind", "words", "shares"),
    [
        (
            NotPublished,
            "no version of the model 'nobody' for players: it has bot, careful",
            {"bot": 0.5, "nobody": 0.5},
        ),
        (InputError, "two models", {"bot": 1.0}),
        (InputError, "two models", {}),
        (InputError, "add up to 0.9", {"bot": 0.5, "careful": 0.4}),
        (InputError, "between 0 and 1", {"bot": 0.0, "careful": 1.0}),
        (InputError, "between 0 and 1", {"bot": float("nan"), "careful": 1.0}),
        (InputError, "model name", {"../x": 0.5, "careful": 0.5}),
    ],
)
def test_what_cannot_be_tested(registry: Registry, kind: type[Exception], words: str, shares: dict[str, float]) -> None:
    with pytest.raises(kind, match=words):
        registry.start_ab(NAME, shares, by="person")
    assert registry.ab(NAME).running is None


def test_a_model_that_is_not_in_the_test_is_not_kept(registry: Registry) -> None:
    registry.start_ab(NAME, HALVES, by="person")
    with pytest.raises(NotPublished, match="'wild' is none of the test's models, which are bot, careful"):
        registry.stop_ab(NAME, "wild", by="person")
    assert registry.ab(NAME).running is not None


def test_of_several_who_start_at_once_one_succeeds(registry: Registry) -> None:
    won: list[AbTest] = []

    def start() -> None:
        with contextlib.suppress(AbRunning):
            won.append(registry.start_ab(NAME, HALVES, by="person"))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [registry.ab(NAME).running]


def test_a_start_whose_answer_was_lost(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry("memory:///")
    for model in HALVES:
        registry.publish(policy, algorithm="dqn", model=model)
    put = obstore.put

    def twice(store: Any, path: str, data: bytes, **options: Any) -> Any:
        put(store, path, data, **options)
        return put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put", twice)
    assert registry.start_ab(NAME, HALVES, by="person") == registry.ab(NAME).running
    assert registry.stop_ab(NAME, by="person").ended is not None


def test_of_a_game_that_has_nothing_no_test_is_ended(tmp_path: Path) -> None:
    with pytest.raises(NotRunning):
        Registry(tmp_path).stop_ab("Nothing", by="person")
    with pytest.raises(NotPublished, match="it has none yet"):
        Registry(tmp_path).start_ab("Nothing", HALVES, by="person")


@pytest.mark.parametrize(
    "text",
    [
        b'{"run',
        b'{"running": {"id": "x", "shares": {}, "started": 1}}',
        b'{"running": {"id": "x", "shares": {"../../x": 1}, "started": 1}}',
        b'{"running": {"id": "x", "shares": {"bot": -5}, "started": 1}}',
        b'{"running": {"id": "x", "shares": {"bot": 1}, "started": 1, "cursor": 99999999999999999999}}',
    ],
)
def test_a_damaged_file_is_no_test_and_said_once(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    registry = Registry(tmp_path)
    for model in HALVES:
        registry.publish(policy, algorithm="dqn", model=model)
    registry.start_ab(NAME, HALVES, by="person")
    (tmp_path / "games" / NAME / "ab.json").write_bytes(text)
    assert [registry.ab(NAME).running for _ in range(3)] == [None] * 3
    assert [record.message for record in caplog.records if "damaged" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
    registry.start_ab(NAME, HALVES, by="person")
    assert registry.ab(NAME).running is not None
