import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import GAME, FakeServer, Handler, Reply, policy_file, problem, walk
from waiting import until

from sparring.client import Acted, Client, Unavailable, bots
from sparring.client.bot import Bot, Loaded
from sparring.client.convert import to_feeds
from sparring.client.recorder import Recorder
from sparring.errors import InputError
from sparring.export.onnx import render
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Deterministic, Gaussian, QValues, Squashed

Make = Callable[..., Client]
OBS = np.array([0.1, -0.2, 0.3, -0.4], np.float32)
V1, V2, V3 = (policy_file(GAME, seed) for seed in range(3))


@pytest.fixture
def published(server: FakeServer) -> FakeServer:
    server.publish(GAME, V1, 1)
    return server


def downloads(server: FakeServer) -> int:
    return sum("/files/" in path for _, path in server.requests)


def test_the_newest_version_plays(published: FakeServer, client_of: Make) -> None:
    bot = client_of(published.url).bot()
    assert (bot.model, bot.version) == ("bot", 1)
    action = bot.act(OBS)
    assert type(action) is int
    assert action in range(3)
    assert [bot.act(OBS) for _ in range(5)] == [action] * 5
    assert len({bot.act(OBS * scale, explore=True) for scale in np.linspace(-3, 3, 200)}) > 1


def test_what_the_bot_did_is_recorded_as_its_own(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url)
    bot = client.bot()
    for i in range(4):
        client.record(OBS, bot.act(OBS, explore=True), 1.0, i == 3, False, OBS)
    client.record(OBS, bot.act(OBS), 1.0, True, False, OBS)
    assert client.flush()
    explored, greedy = sorted(published.fragments.values(), key=lambda f: -f.steps)
    assert (explored.model, explored.version, explored.steps) == ("bot", 1, 4)
    assert (greedy.model, greedy.version, greedy.log_prob) == ("bot", 1, None)
    columns = explored.columns(GAME)
    policy = Loaded(V1, GAME, "bot", 1)
    for action, log_prob in zip(columns.action, columns.log_prob, strict=True):
        # Gumbel-max noise that makes the policy choose this action, to ask for its log-probability.
        noise = np.full((1, 3), 1e-6, np.float32)
        noise[0, action] = 1 - 1e-6
        chosen, expected = policy.run({"obs": OBS[None]}, noise)
        assert (chosen[0], pytest.approx(log_prob, abs=1e-5)) == (action, expected[0])


def test_random_play_until_there_is_a_version(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url, refresh=0.05)
    bot = client.bot()
    assert (bot.model, bot.version) == ("random", 0)
    assert {bot.act(OBS) for _ in range(100)} == {0, 1, 2}
    client.record(OBS, bot.act(OBS, explore=True), 0.0, True, False, OBS)
    assert client.flush()
    (fragment,) = server.fragments.values()
    assert (fragment.model, fragment.version) == ("random", 0)
    assert fragment.columns(GAME).log_prob == pytest.approx([-np.log(3)])
    server.publish(GAME, V1, 1)
    until(lambda: bot.act(OBS) is not None and bot.version == 1)


def test_a_newer_version_takes_over_between_episodes(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url, refresh=0.05)
    bot = client.bot()
    client.record(OBS, bot.act(OBS, explore=True), 0.0, False, False, OBS)
    published.publish(GAME, V2, 2)
    until(lambda: client.newest().policy.version == 2)
    client.record(OBS, bot.act(OBS, explore=True), 0.0, True, False, OBS)
    assert bot.version == 1  # until the episode was over
    client.record(OBS, bot.act(OBS, explore=True), 0.0, True, False, OBS)
    assert bot.version == 2
    assert client.flush()
    assert sorted((f.version, f.steps) for f in published.fragments.values()) == [(1, 2), (2, 1)]


def test_nothing_new_is_not_downloaded_again(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url, refresh=0.02)
    client.bot()
    client.player("bob").bot()
    looks = len(published.requests)
    until(lambda: len(published.requests) > looks + 5)
    assert downloads(published) == 1
    client_of(published.url, refresh=100.0).bot()  # another process on this machine
    assert downloads(published) == 1


def test_without_a_server_the_bot_of_last_time_plays(published: FakeServer, client_of: Make) -> None:
    client_of(published.url).bot()
    published.stop()
    bot = client_of(published.url).bot()
    assert (bot.model, bot.version) == ("bot", 1)
    assert bot.act(OBS) in range(3)


def test_a_damaged_copy_on_disk_is_replaced(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url)
    client.bot()
    (path,) = client.directory.glob("bots/*.onnx")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert client_of(published.url).bot().version == 1
    assert path.read_bytes() == V1


def no_files(handler: Handler, body: bytes) -> Reply | bool | None:
    return None if "/files/" in handler.path else False


def html_latest(handler: Handler, body: bytes) -> Reply | bool | None:
    return Reply(200, b"<html>") if "/latest" in handler.path else False


def short_file(handler: Handler, body: bytes) -> Reply | bool | None:
    return Reply(200, V2[:-10]) if "/files/" in handler.path else False


@pytest.mark.parametrize("fault", [no_files, html_latest, short_file])
def test_a_download_that_fails_leaves_the_version_that_is_there(
    published: FakeServer,
    client_of: Make,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Handler, bytes], Reply | bool | None],
) -> None:
    client = client_of(published.url, refresh=0.02)
    bot = client.bot()
    published.fault = fault
    published.publish(GAME, V2, 2)
    looks = len(published.requests)
    until(lambda: len(published.requests) > looks + 4)
    assert bot.act(OBS) in range(3)
    assert bot.version == 1
    logged = [r.getMessage() for r in caplog.records if "no newer bot for now" in r.getMessage()]
    assert len(logged) == 1
    assert "version 1 of 'bot' goes on playing" in logged[0]
    published.fault = None
    until(lambda: bot.act(OBS) is not None and bot.version == 2)


OTHER = Game("Pong", Box((5,)), Discrete(3))


@pytest.mark.parametrize(
    ("data", "sha256", "message"),
    [
        (V2, "0" * 64, "is damaged: its sha256"),
        (b"not an onnx file", None, "not a policy"),
        (policy_file(OTHER), None, "was made for schema"),
    ],
)
def test_a_bad_file_is_not_played(
    published: FakeServer,
    client_of: Make,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    sha256: str | None,
    message: str,
) -> None:
    client = client_of(published.url, refresh=0.02)
    bot = client.bot()
    published.publish(GAME, data, 2, sha256)
    until(lambda: message in caplog.text)
    assert bot.act(OBS) in range(3)
    assert bot.version == 1
    published.publish(GAME, V3, 3)
    until(lambda: bot.act(OBS) is not None and bot.version == 3)


def test_only_a_few_files_are_kept(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url)
    newest = client.newest()
    for version in range(2, 14):
        published.publish(GAME, policy_file(GAME, version), version)
        newest.refresh()
        assert newest.policy.version == version
    assert len(list(client.directory.glob("bots/*.onnx"))) == 8


def test_a_certain_version(published: FakeServer, client_of: Make) -> None:
    published.publish(GAME, V2, 2)
    client = client_of(published.url)
    assert client.bot(version=1).version == 1
    with pytest.raises(InputError, match="no such version"):
        client.bot(version=9)
    with pytest.raises(InputError, match="is no model's name"):
        client.bot("../x")


def test_asking_the_server(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)
    assert client.act(OBS) == 2
    action = client.act(OBS, explore=True)
    assert type(action) is int
    client.record(OBS, action, 0.0, True, False, OBS)
    assert client.flush()
    (fragment,) = server.fragments.values()
    assert (fragment.model, fragment.version) == ("bot", 7)
    assert fragment.columns(GAME).log_prob == pytest.approx([-0.5])
    with pytest.raises(InputError, match=r"observation: expected shape \(4,\)"):
        client.act(OBS[:3])
    server.fault = lambda handler, body: problem(404, "no version yet")
    with pytest.raises(InputError, match="no version yet"):
        client.act(OBS)
    server.fault = lambda handler, body: Reply(200, b"<html>")
    with pytest.raises(Unavailable):
        client.act(OBS)


RICH = Dict({"where": Box((2,)), "weapon": Discrete(4, start=1), "view": Box((8, 8, 3), "uint8")})
GAMES = {
    "discrete": (Game("A", Discrete(5, start=1), Discrete(3, start=2)), Categorical()),
    "q-values": (Game("B", Box((4,), "float64"), Discrete(4)), QValues()),
    "parts": (Game("C", MultiDiscrete((2, 3)), MultiDiscrete((3, 2, 4))), Categorical()),
    "dict": (Game("D", RICH, Discrete(3)), Categorical()),
    "gaussian": (Game("E", Box((2, 2)), Box((3,), low=-1.0, high=2.0)), Gaussian()),
    "squashed": (Game("F", Box((3,)), Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0))), Squashed()),
    "deterministic": (Game("G", Box((3,)), Box((2, 2), low=-2.0, high=2.0)), Deterministic()),
}


def sample(game: Game, rows: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    def fill(space: Any) -> Any:
        if isinstance(space, Discrete):
            return rng.integers(space.start, space.start + space.n, rows)
        if isinstance(space, MultiDiscrete):
            return rng.integers(0, space.nvec, (rows, len(space.nvec)))
        return rng.uniform(0, 200 if space.dtype == "uint8" else 1, (rows, *space.shape))

    out = np.empty(rows, game.observation.element) if isinstance(game.observation, Dict) else None
    if out is None:
        return fill(game.observation).astype(game.observation.element.base)
    for name, part in game.observation.fields.items():
        out[name] = fill(part)
    return out


@pytest.mark.parametrize("name", GAMES)
def test_a_bot_does_what_the_policy_does(name: str, random_policy: Callable[..., Policy]) -> None:
    game, head = GAMES[name]
    policy = random_policy(game, (Dense(16),), head, exploration=0.3)
    loaded = Loaded(render(policy), game, "bot", 1)
    player = Recorder(game, "anna", lambda cut: None)
    bot = Bot(game, player, lambda: loaded, seed=5)
    draws = np.random.default_rng(5)
    noise = np.concatenate([loaded.noise(draws, 1), loaded.noise(draws, 100)])  # as the bot draws it: one, then many
    obs = sample(game, 6, np.random.default_rng(0))
    singles = [{f: row[f] for f in obs.dtype.names} for row in obs] if obs.dtype.names else list(obs)
    greedy, _ = policy.act(obs)
    drawn, log_prob = policy.act(obs, noise[:6])
    for i, one in enumerate(singles):
        np.testing.assert_allclose(bot.act(one), greedy[i], rtol=1e-4, atol=1e-5)
    for i, one in enumerate(singles):
        action = bot.act(one, explore=True)
        np.testing.assert_allclose(action, drawn[i], rtol=1e-4, atol=1e-5)
        assert isinstance(action, int if isinstance(game.action, Discrete) else np.ndarray)
        assert player.last_act is not None
        expected = None if log_prob is None else pytest.approx(log_prob[i], rel=1e-3, abs=1e-3)
        assert player.last_act[1] == Acted("bot", 1, expected)
        player.record(one, action, 0.0, False, False, one)
    np.testing.assert_allclose(bot.act_batch(obs).action, greedy, rtol=1e-4, atol=1e-5)
    mapping = {f: obs[f] for f in obs.dtype.names} if obs.dtype.names else obs
    batch = bot.act_batch(mapping, explore=True)
    assert batch.action.shape == greedy.shape
    assert (batch.log_prob is None) == (log_prob is None)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="expected columns named view, weapon, where"):
        to_feeds(RICH, np.zeros((3, 4)))
    with pytest.raises(InputError, match="expected columns named"):
        to_feeds(RICH, {"view": []})
    with pytest.raises(InputError, match="different numbers of rows"):
        to_feeds(RICH, {"view": np.zeros((2, 8, 8, 3)), "weapon": [1], "where": np.zeros((2, 2))})
    with pytest.raises(InputError, match="observation: expected 2"):
        to_feeds(Box((4,)), np.zeros((2, 3)))


def test_acting_goes_on_while_versions_change(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url, refresh=100.0)
    bot, newest, failures = client.bot(), client.newest(), []
    stop = threading.Event()

    def act() -> None:
        while not stop.is_set():
            if bot.act(OBS, explore=True) not in range(3):
                failures.append("outside the space")

    threads = [threading.Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 12):
        published.publish(GAME, (V1, V2, V3)[version % 3], version)
        newest.refresh()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert bot.act(OBS) in range(3)
    assert bot.version == 11


def test_a_policy_that_lacks_an_output_is_refused(tmp_path: Path) -> None:
    import onnx

    model = onnx.load_from_string(V1)
    del model.graph.output[1]
    with pytest.raises(InputError, match="not a"):
        Loaded(model.SerializeToString(), GAME, "bot", 1)


def test_noise_is_optional_without_a_warning_and_other_warnings_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    import onnx

    model = onnx.load_from_string(V1)
    assert "noise" in {tensor.name for tensor in model.graph.initializer}  # other runtimes may leave it out
    Loaded(V1, GAME, "bot", 1)
    assert capfd.readouterr().err == ""
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "useless"))
    Loaded(model.SerializeToString(), GAME, "bot", 1)
    assert "'useless'. It is not used by any node" in capfd.readouterr().err


def test_steps_of_a_bot_asked_for_one_player_are_not_anothers(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url)
    bot = client.player("bob").bot()
    step = walk(1)[0]
    client.record(step[0], bot.act(step[0]), *step[2:])
    assert client.flush()
    (fragment,) = published.fragments.values()
    assert fragment.model is None


class Trickle:
    """A server's fault: a model's file comes a byte at a time, until the test lets it hurry."""

    def __init__(self) -> None:
        self.hurry, self.begun = threading.Event(), threading.Event()

    def __call__(self, handler: Handler, body: bytes) -> Reply | bool | None:
        if "/files/" not in handler.path:
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(V2)))
        handler.end_headers()
        sent = 0
        while sent < len(V2) and not self.hurry.is_set() and not handler.server.ending.is_set():
            handler.wfile.write(V2[sent : sent + 1])
            handler.wfile.flush()
            sent += 1
            self.begun.set()
            self.hurry.wait(0.05)
        handler.wfile.write(V2[sent:])
        return None


def test_a_slow_download_delays_no_upload(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url, refresh=0.05, timeout=60)
    bot = client.bot()
    published.fault = trickle = Trickle()
    published.publish(GAME, V2, 2)
    assert trickle.begun.wait(10)
    for episode in range(5):
        for step in walk(4, episode):
            client.record(*step)
        start = time.monotonic()
        assert client.flush(10)
        assert time.monotonic() - start < 5
    assert published.steps() == 20
    assert not trickle.hurry.is_set()
    assert bot.act(OBS) in range(3)
    assert bot.version == 1
    trickle.hurry.set()
    until(lambda: bot.act(OBS) is not None and bot.version == 2)


def test_a_slow_download_does_not_hold_up_the_end(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url, refresh=0.05, timeout=60)
    client.bot()
    published.fault = trickle = Trickle()
    published.publish(GAME, V2, 2)
    assert trickle.begun.wait(10)
    for step in walk(4):
        client.record(*step)
    start = time.monotonic()
    client.close(timeout=20)
    assert time.monotonic() - start < 5
    assert published.steps() == 4


def test_a_slow_upload_delays_no_bot(published: FakeServer, client_of: Make) -> None:
    client = client_of(published.url, refresh=0.05, timeout=60)
    bot, hang = client.bot(), threading.Event()

    def fault(handler: Handler, body: bytes) -> Reply | bool | None:
        if handler.path.endswith("/fragments"):
            hang.wait(30)
        return False

    published.fault = fault
    for step in walk(4):
        client.record(*step)
    assert not client.flush(0.5)
    published.publish(GAME, V2, 2)
    until(lambda: bot.act(OBS) is not None and bot.version == 2, seconds=10)
    assert client.stats.uploaded == 0
    hang.set()
    assert client.flush()


def test_the_thread_of_the_bots_outlives_any_error(
    published: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bots, "FAULT_DELAY", 0.01)
    client = client_of(published.url, refresh=0.05)
    bot, newest, calls = client.bot(), client.newest(), []

    def break_down() -> None:
        calls.append(1)
        raise ZeroDivisionError("oops")

    with monkeypatch.context() as patch:
        patch.setattr(newest, "refresh", break_down)
        until(lambda: len(calls) > 3)
    assert [r.getMessage() for r in caplog.records if "oops" in r.getMessage() and r.levelname == "WARNING"] == [
        "looking for a newer bot failed: ZeroDivisionError: oops. It is tried again later"
    ]
    published.publish(GAME, V2, 2)
    until(lambda: bot.act(OBS) is not None and bot.version == 2)
