"""Rollout workers: what they write is what was played; the dead and the hung are replaced."""

import logging
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from sparring.algorithms.replay import END
from sparring.errors import SparringError
from sparring.games import catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, param_shapes
from sparring.rollout.actor import SharedBuffers
from sparring.rollout.pool import LocalPlay, Pool, plan_for


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}")


def policy_for(name, scale=0.1):
    game = catalog.load(name)
    layers, head = (Dense(8),), Categorical()
    rng = np.random.default_rng(0)
    shapes = param_shapes(game, layers, head)
    return Policy(game, layers, head, {k: scale * rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()})


def plan(policy, workers, envs=2, steps=12):
    return plan_for(policy, workers=workers, envs=envs, steps=steps, slots=2, seed=3)


def played(source, policy, rounds=3):
    source.publish(policy)
    blocks = []
    try:
        for _ in range(rounds):
            source.start()
            taken = [source.take() for _ in range(source.plan.workers)]
            blocks += [(b.worker, b.lag, [a.copy() for a in b.rows], b.episodes) for b in taken]
    finally:
        source.close()
    return blocks


def test_weights_that_changed_while_they_were_read_are_read_again(monkeypatch):
    policy = policy_for("CartPole-v1")
    buffers = SharedBuffers(form := plan(policy, 1), bytearray(SharedBuffers.size_of(form)))
    flat, copy, calls = np.empty(buffers.weights.shape[1], np.float32), np.copyto, []
    for number in (1.0, 2.0):
        buffers.write([np.full_like(flat, number)], 0.0, False)

    def interrupted(into, weights):
        copy(into, weights)
        calls.append(into[0])
        if len(calls) == 1:
            buffers.write([np.full_like(flat, 3.0)], 0.0, False)

    monkeypatch.setattr(np, "copyto", interrupted)
    assert buffers.read(flat)[0] == 3
    assert calls == [2.0, 3.0]


@pytest.mark.parametrize("name", ["odd_games:Odd-v0", "CartPole-v1"])
def test_rows_are_what_was_played(name):
    policy = policy_for(name)
    returns = []
    total = lengths = 0.0
    for _, _, (obs, action, reward, kind, log_prob), episodes in played(LocalPlay(plan(policy, 0)), policy, 20):
        assert obs.shape[:2] == kind.shape == (2, 13)
        assert (kind[:, -1] == END).all()
        assert (reward[:, :-1][kind[:, :-1] == END] == 0).all()
        if name.endswith("Odd-v0"):
            steps = kind[:, :-1] != END
            assert np.array_equal(reward[:, :-1][steps], (action == obs[..., 0])[:, :-1][steps])
        # Every log-probability is the one that the policy gives for that observation and action.
        flat = policy.outputs(obs[:, :-1].reshape(-1, *obs.shape[2:]))
        logp = flat - np.log(np.exp(flat).sum(-1, keepdims=True))
        expected = logp[np.arange(len(logp)), action[:, :-1].ravel()]
        assert log_prob[:, :-1].ravel() == pytest.approx(expected, abs=1e-5)
        total += reward[:, :-1].sum()
        returns += [episode.ret for episode in episodes]
        lengths += sum(episode.length for episode in episodes)
    assert returns
    assert 0 <= total - sum(returns) <= 2 * 500  # all rewards but those of the two episodes that go on


@pytest.fixture
def in_trouble(tmp_path, monkeypatch):
    """`in_trouble("hang")`: a policy of a game that does this; who does it first removes the file."""

    def make(what):
        (tmp_path / "trouble").write_text(what)
        monkeypatch.setenv("ODD_TROUBLE", str(tmp_path / "trouble"))
        return policy_for("odd_games:Odd-v0")

    return make


@pytest.mark.real
class TestPool:
    def test_workers_play_what_one_process_plays(self, tmp_path):
        policy = policy_for("CartPole-v1")
        here = played(LocalPlay(plan(policy, 0)), policy)
        there = [b for b in played(Pool(plan(policy, 2), 60.0, tmp_path), policy) if b[0] == 0]
        assert len(there) == len(here) == 3
        for (_, _, ours, episodes), (_, _, theirs, theirs_episodes) in zip(here, there, strict=True):
            assert episodes == theirs_episodes
            for a, b in zip(ours, theirs, strict=True):
                assert np.array_equal(a[:, :-1], b[:, :-1])

    def test_new_weights_reach_the_workers(self, tmp_path):
        policy = policy_for("odd_games:Odd-v0")
        sure = {k: np.zeros_like(v) for k, v in policy.params.items()}
        sure["head.b"] = np.array([-50.0, 50.0], np.float32)
        pool = Pool(plan(policy, 1), 60.0, tmp_path)
        try:
            for params, only_ones in ((policy.params, False), (sure, True)):
                pool.publish(Policy(policy.game, policy.layers, policy.head, params))
                pool.start()
                block = pool.take()
                assert block.lag == 0
                assert (block.rows.action[:, :-1] == 1).all() == only_ones
            pool.start()
            pool.publish(policy)
            pool.publish(policy)
            assert 0 <= pool.take().lag <= 2
        finally:
            pool.close()

    def test_a_learner_slower_than_play_hears_every_worker(self, tmp_path):
        policy = policy_for("odd_games:Odd-v0")
        pool = Pool(plan(policy, 3), 60.0, tmp_path)
        try:
            pool.publish(policy)
            pool.start()
            pool.start()
            heard = []
            for _ in range(12):
                while not all(worker.control.poll() for worker in pool.workers):
                    time.sleep(0.01)
                block = pool.take()
                heard.append(block.worker)
                pool.release(block)
            assert [heard.count(worker) for worker in range(3)] == [4, 4, 4]
        finally:
            pool.close()

    @pytest.mark.parametrize(("trouble", "says"), [("die", "exit code 7"), ("hang", "no sign of life")])
    def test_who_dies_or_hangs_is_replaced_and_play_goes_on(self, tmp_path, in_trouble, caplog, trouble, says):
        policy = in_trouble(trouble)
        pool = Pool(plan(policy, 2), 4.0, tmp_path / "logs")
        with caplog.at_level(logging.WARNING, "sparring.rollout"):
            blocks = played(pool, policy, 4)
        assert len(blocks) == 8
        assert pool.replaced == 1
        (logged,) = [record.getMessage() for record in caplog.records]
        assert says in logged
        assert "the game is in trouble" in logged
        if trouble == "hang":
            assert "odd_games.py" in logged  # where it hung
            assert "_trouble" in logged

    def test_in_our_own_process_a_hung_game_is_reported(self, tmp_path, in_trouble, caplog):
        policy = in_trouble("nap")
        with caplog.at_level(logging.WARNING, "sparring.rollout"):
            assert len(played(LocalPlay(plan(policy, 0), limit=0.5), policy, 2)) == 2
        assert caplog.text.count("the game has not answered for 0.5 s") == 1
        assert "in _trouble" in caplog.text  # where it hung

    def test_who_was_not_asked_is_not_late(self, tmp_path):
        """Learning may take longer than the limit: a worker that waited meanwhile has done nothing wrong."""
        policy = policy_for("CartPole-v1")
        pool = Pool(plan(policy, 1), 5.0, tmp_path)
        (worker,) = pool.workers
        try:
            pool.publish(policy)
            pool.start()
            pool.take()
            worker.process.send_signal(signal.SIGSTOP)
            pool.buffers.beats[:] = worker.since = time.monotonic() - 100  # so long we have been learning
            pool.start()
            pool._look_for_hung()
            worker.process.send_signal(signal.SIGCONT)
            pool.take()
            assert pool.replaced == 0
        finally:
            pool.close()

    def test_the_hung_are_found_while_others_play_on(self, tmp_path, in_trouble):
        policy = in_trouble("hang")
        pool = Pool(plan(policy, 2), 2.0, tmp_path / "logs")
        pool.publish(policy)
        pool.start()
        pool.start()
        until = time.monotonic() + 60
        try:
            while pool.replaced == 0:
                pool.release(pool.take())
                assert time.monotonic() < until
        finally:
            pool.close()

    def test_signals_to_the_whole_group_are_the_learners(self, tmp_path):
        policy = policy_for("CartPole-v1")
        pool = Pool(plan(policy, 2), 60.0, tmp_path)
        try:
            pool.publish(policy)
            pool.start()
            for _ in range(2):
                pool.take()
            for process in (*(worker.process for worker in pool.workers), pool.forkserver.process):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGINT)
            assert all(state is not None for state in pool.state())
            pool.start()
            for _ in range(2):
                pool.take()
            assert pool.replaced == 0
        finally:
            pool.close()

    def test_a_game_that_hangs_when_its_state_is_asked_for_is_killed(self, tmp_path, caplog):
        policy = policy_for("CartPole-v1")
        pool = Pool(plan(policy, 2), 2.0, tmp_path)
        try:
            pool.publish(policy)
            pool.start()
            for _ in range(2):
                pool.take()
            pool.workers[0].process.send_signal(signal.SIGSTOP)
            with caplog.at_level(logging.WARNING, "sparring.rollout"):
                assert [state is not None for state in pool.state()] == [False, True]
            assert "did not tell its state" in caplog.text
            pool.start()
            for _ in range(2):
                pool.take()
        finally:
            pool.close()

    def test_a_hung_worker_ends_with_its_fork_server(self, tmp_path, in_trouble):
        policy = in_trouble("hang")
        pool = Pool(plan(policy, 1), 60.0, tmp_path / "logs")
        pool.publish(policy)
        pool.start()
        until = time.monotonic() + 60
        while (tmp_path / "trouble").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        worker = psutil.Process(pool.workers[0].process.pid)
        pool.forkserver.process.kill()  # as when the learner is killed: its socket ends, and it goes
        gone, _ = psutil.wait_procs([worker], timeout=30)
        assert gone
        pool.close()

    def test_a_game_that_always_dies_ends_the_run_with_its_last_words(self, tmp_path, in_trouble):
        policy = in_trouble("die always")
        pool = Pool(plan(policy, 1), 60.0, tmp_path / "logs")
        with pytest.raises(SparringError, match=r"(?s)exit code 7.*3 times in a row.*the game is in trouble"):
            played(pool, policy)

    def test_closing_leaves_no_process_behind(self, tmp_path):
        policy = policy_for("CartPole-v1")
        pool = Pool(plan(policy, 2), 60.0, tmp_path)
        pool.publish(policy)
        pool.start()
        pool.close()
        assert all(worker.process.poll() is not None for worker in pool.workers)
