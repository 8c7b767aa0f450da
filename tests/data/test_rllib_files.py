"""RLlib's offline files: JSON batches and whole episodes as RLlib itself makes them, and rows of steps as its docs
describe them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparring.data import importing
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Box, Discrete, Game

GAME = Game("pole", Box((4,)), Discrete(2))
STEPS = 5


def columns(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    obs = rng.standard_normal((STEPS + 1, 4)).astype(np.float32)
    return obs, rng.integers(0, 2, STEPS), np.arange(STEPS, dtype=np.float32)


def read(path: Path) -> list[Fragment]:
    found = list(importing.read(GAME, str(path), "rllib", player="robot"))
    assert all(isinstance(f, Fragment) for f in found), found
    return found  # type: ignore[return-value]


def compare(found: list[Fragment], episodes: list[tuple[Any, Any, Any]], *, terminated: bool = True) -> None:
    assert len(found) == len(episodes)
    assert len({f.episode for f in found}) == len(episodes)
    for f, (obs, action, reward) in zip(found, episodes, strict=True):
        got = f.columns(GAME)
        assert (f.player, f.start, f.steps, f.terminated, f.model) == ("robot", 0, STEPS, terminated, None)
        assert np.array_equal(got.obs, obs)
        assert np.array_equal(got.action, action)
        assert np.array_equal(got.reward, reward)


def test_rows_of_steps_in_parquet(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    episodes = [columns(rng) for _ in range(3)]

    def joined(values: list[Any]) -> Any:
        return pa.array(np.concatenate(values).tolist())

    last = [i == STEPS - 1 for i in range(STEPS)] * 3
    rows = {
        "eps_id": pa.array([f"e{i}" for i in range(3) for _ in range(STEPS)]),
        "obs": joined([obs[:-1] for obs, _, _ in episodes]),
        "new_obs": joined([obs[1:] for obs, _, _ in episodes]),
        "actions": joined([action for _, action, _ in episodes]),
        "rewards": joined([reward for _, _, reward in episodes]),
        "terminateds": pa.array(last),
        "truncateds": pa.array([False] * 3 * STEPS),
        "action_logp": pa.array([-0.5] * 3 * STEPS),
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    found = read(tmp_path)
    compare(found, episodes)
    assert [f.id for f in found] == [f.id for f in read(tmp_path)]  # again: the same ids
    for f in found:
        assert f.log_prob == np.full(STEPS, -0.5, "<f4").tobytes()


@pytest.mark.real
def test_batches_that_rllib_writes_as_json(tmp_path: Path) -> None:
    from ray.rllib.offline.json_writer import JsonWriter
    from ray.rllib.policy.sample_batch import SampleBatch

    rng = np.random.default_rng(2)
    episodes = [columns(rng) for _ in range(3)]
    for name, compressed in (("plain", []), ("packed", ["obs", "new_obs"])):
        writer = JsonWriter(str(tmp_path / name), compress_columns=compressed)
        for i, (obs, action, reward) in enumerate(episodes):
            last = np.arange(STEPS) == STEPS - 1
            writer.write(
                SampleBatch(
                    obs=obs[:-1], new_obs=obs[1:], actions=action, rewards=reward, terminateds=last,
                    truncateds=np.zeros(STEPS, bool), eps_id=np.full(STEPS, i),
                )
            )  # fmt: skip
    compare(read(tmp_path / "plain"), episodes)
    with pytest.raises(InputError, match="compressed by pickling, which may run anything"):
        read(tmp_path / "packed")


def packed(value: Any) -> Any:
    """As the package msgpack-numpy writes arrays and numbers."""
    if isinstance(value, np.ndarray):
        shape, data = value.shape, value.tobytes()
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": shape, b"data": data}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    return str(value)


@pytest.mark.real
def test_whole_episodes_that_rllib_packs(tmp_path: Path) -> None:
    import msgpack
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    items, episodes = [], [columns(np.random.default_rng(i)) for i in range(2)]
    for obs, action, reward in episodes:
        episode = SingleAgentEpisode(
            observations=list(obs), actions=list(action), rewards=list(reward), terminated=True, len_lookback_buffer=0
        )
        episode.to_numpy()
        items.append(msgpack.packb(episode.get_state(), default=packed))
    pq.write_table(pa.table({"item": pa.array(items)}), tmp_path / "a.parquet")
    compare(read(tmp_path), episodes)
