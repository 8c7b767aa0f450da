"""The commands about runs, as a person would use them."""

import json
import shutil
import struct
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from sparring import algorithms
from sparring.cli import training as commands
from sparring.cli.publishing import publish
from sparring.edge import exporter
from sparring.errors import InputError
from sparring.experiment import Checkpoints, Evaluation, Experiment, Rollout, Stop, write
from sparring.export import formats
from sparring.games import Box, Discrete, catalog
from sparring.registry.registry import Registry
from sparring.runs import checkpoint
from sparring.runs.live_view import Lines, Terminal, remaining, sparkline
from sparring.runs.plot import curve, drawn_return, groups
from sparring.runs.run import Run
from sparring.runs.tensorboard import EventFile
from sparring.store.profile import GameSettings, Origin, Profile, Revision
from sparring.store.sqlite import SqliteStore
from sparring.trainer import warm
from sparring.trainer.settings import Settings
from sparring.training import loop
from sparring.training.evaluate import play
from sparring.training.learner import Learner

app = typer.Typer()
for _name in ("train", "evaluate", "record", "plot", "runs"):
    app.command(_name)(getattr(commands, _name))
app.command("publish")(publish)


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        e = Experiment(
            game="CartPole-v1",
            algorithm={"name": "dqn", "layers": [{"layer": "dense", "units": 16}], "learning_starts": 64, "batch": 16},
            rollout=Rollout(envs=4, steps=8),
            iteration=200,
            stop=Stop(iterations=4),
            evaluation=Evaluation(every=2, episodes=2),
            checkpoint=Checkpoints(every=0, keep=1),
            seed=seed,
            out=str(root / f"seed-{seed}"),
        )
        loop.train(e)
    return Run(root / "seed-1")


def test_train_by_a_games_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--set", "stop={iterations: 2}", "--set", "iteration=200", "--set", "evaluation.every=0")
    for number in (1, 2):
        assert f"runs/CartPole-v1-dqn-{number}" in call("train", "CartPole-v1", *words)
    said = call("train", "CartPole-v1", "--algorithm", "ppo", "--set", "algorithm.steps=128", *words)
    assert "runs/CartPole-v1-ppo-1" in said
    said = call("train", "runs/CartPole-v1-ppo-1", "--resume", "--set", "stop.iterations=3")
    assert "iteration 3" in said
    assert "CartPole-v1-ppo-1" in call("runs")
    with pytest.raises(InputError, match="continue it with --resume"):
        call("train", "runs/CartPole-v1-ppo-1")


@pytest.mark.parametrize("name", ["run #1", "2024", "~x", "null"])
def test_out_is_a_path_whatever_it_is_called(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    words = ("--set", "stop.iterations=1", "--set", "iteration=100", "--set", "algorithm.layers=[]")
    assert name in call("train", "CartPole-v1", *words, "--out", name)
    assert Run(tmp_path / name).experiment.stop == Stop(iterations=1)  # what is asked for, and nothing else


def test_a_run_that_cannot_be_read_hides_no_other(run, capsys):
    bad = run.path.with_name("bad")
    bad.mkdir()
    (bad / "experiment.yaml").touch()
    try:
        said = call("runs", run.path.parent)
    finally:
        (bad / "experiment.yaml").unlink()
        bad.rmdir()
    assert "seed-1" in said
    assert "not listed: " in said


def test_runs_that_are_a_link_to_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("nowhere/runs")
    with pytest.raises(FileExistsError):
        call("train", "CartPole-v1")


def test_a_module_of_ones_own_lies_where_one_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    source = (Path(__file__).parents[1] / "odd_games.py").read_text()
    (tmp_path / "my_own_games.py").write_text(source.replace("{_kind.__name__}-v0", "{_kind.__name__}-v7"))
    assert catalog.load("my_own_games:Odd-v7").name == "Odd-v7"
    (tmp_path / "my_bad_games.py").write_text("import not_there_at_all")
    with pytest.raises(InputError, match="needs my_bad_games: No module named 'not_there_at_all'"):
        catalog.load("my_bad_games:Odd-v7")


def test_evaluate_tells_the_same_twice(run):
    said = call("evaluate", run.path, "--episodes", 5)
    assert said == call("evaluate", run.path, "--episodes", 5)
    assert "return_mean" in said


def test_publish_then_evaluate_by_name(run, tmp_path):
    where = ("--registry", tmp_path / "registry")
    assert call("publish", run.path, *where).splitlines()[0] == "CartPole-v1/bot/1"
    assert call("publish", run.path, *where).splitlines()[0] == "CartPole-v1/bot/2"
    assert "the best evaluated policy" in call("publish", f"{run.path}@best", *where)
    assert call("publish", f"{run.path}@last", *where) == "CartPole-v1/bot/4\n"
    assert call("evaluate", "CartPole-v1/bot/4", *where) == call("evaluate", run.path)
    expected = call("evaluate", f"{run.path}@best")
    for name in ("CartPole-v1/bot/1", "CartPole-v1/bot/2", "CartPole-v1/bot/3"):
        assert call("evaluate", name, *where) == expected
    for name in ("CartPole-v1", "CartPole-v1/bot"):
        assert call("evaluate", name, *where) == call("evaluate", f"{run.path}@last")
    with pytest.raises(InputError, match="has no model 'other'"):
        call("evaluate", "CartPole-v1/other", *where)
    registry = Registry(tmp_path / "registry")
    move = registry.moves("CartPole-v1")[0]
    assert (move.by, move.reason) == ("person", f"published from the run {run.path.name}")
    registry.pin("CartPole-v1", by="person")
    assert "sparring promote CartPole-v1 5" in call("publish", f"{run.path}@last", *where)
    assert registry.aliases("CartPole-v1")["stable"].version == 4


def test_publish_with_further_files(run, tmp_path, monkeypatch):
    """A version has them beside its own, with the page that compares them; what is refused publishes nothing."""
    monkeypatch.setattr(exporter, "HELD_OUT", 50)
    monkeypatch.setattr(exporter, "CALIBRATION", 100)
    where = ("--registry", tmp_path / "registry")
    for also, says in (
        ("jpeg", "no format 'jpeg'"),
        ("c,safetensors", "is a version's own file"),
        ("onnx", "is a version's own file"),
    ):
        with pytest.raises(InputError, match=says):
            call("publish", run.path, *where, "--also", also)
    registry = Registry(tmp_path / "registry")
    assert registry.latest("CartPole-v1") is None
    assert call("publish", run.path, *where, "--also", "c, onnx-int8").splitlines()[0] == "CartPole-v1/bot/1"
    manifest = registry.latest("CartPole-v1")
    own = {"policy.onnx", "policy.safetensors", "card.md"}
    assert set(manifest.files) == own | {"policy.c", "policy.int8.onnx", "export.json"}
    folder = tmp_path / "registry" / "games" / "CartPole-v1" / "models" / "bot" / "1"
    assert (folder / "policy.c").read_bytes() == formats.render("c", run.policy("best"), "policy")["policy.c"]
    page = json.loads((folder / "export.json").read_bytes())["files"]
    assert page["policy.c"]["comparison"]["agreement"] == 1
    assert page["policy.int8.onnx"]["calibration"] == "100 observations of the policy's play"
    assert not any("returns" in row for row in page.values())


def test_publish_for_another_game_with_the_same_spaces(run, tmp_path):
    where = ("--registry", tmp_path / "registry")
    cartpole = catalog.load("CartPole-v1")
    mine = replace(cartpole, name="mine", env=None)
    with pytest.raises(InputError, match=r"no version of a game 'mine'.*--game mine\.json"):
        call("publish", run.path, *where, "--game", "mine")
    with closing(SqliteStore(tmp_path / "store.db")) as store:  # the platform's, beside its registry
        store.register(mine)
        store.register(replace(cartpole, name="other", action=Discrete(3)))
    for version in (1, 2):  # then its game is known from the store, or from the version before
        assert call("publish", run.path, *where, "--game", "mine").splitlines()[0] == f"mine/bot/{version}"
        (tmp_path / "store.db").unlink(missing_ok=version == 2)
    policy = Registry(tmp_path / "registry").policy("mine", "bot", 2)
    assert policy.game == mine
    for name, array in run.policy("best").params.items():
        assert np.array_equal(policy.params[name], array)
    declared = tmp_path / "third.json"
    declared.write_bytes(replace(cartpole, name="third", env=None).to_json())
    assert call("publish", run.path, *where, "--game", declared).splitlines()[0] == "third/bot/1"
    bounded = replace(cartpole, name="third", observation=Box((4,), low=-100.0, high=100.0), env=None)
    declared.write_bytes(bounded.to_json())  # what an upload may hold is nothing to a policy
    assert call("publish", run.path, *where, "--game", declared).splitlines()[0] == "third/bot/2"
    simulated = Registry(tmp_path / "registry").policy("third", "bot", 2)
    assert simulated.game.schema == bounded.schema
    # A trainer of the declared form, which learns from people, goes on from what was simulated.
    name = warm.prepare(tmp_path, Registry(tmp_path / "registry"), bounded, Settings())
    assert not algorithms.find(name).on_policy
    given = checkpoint.hyperparameters(tmp_path, name, bounded, {})
    learner = Learner(algorithms.create(name, bounded, given))
    assert learner.warm_start(simulated, 1000) is None
    for key, array in learner.policy().params.items():
        np.testing.assert_allclose(array, simulated.params[key], rtol=1e-5)
    with pytest.raises(InputError, match="--env ID"):
        call("evaluate", "third/bot/2", *where)
    options = ("--episodes", 2, *where)
    assert call("evaluate", "third/bot/2", "--env", "CartPole-v1", *options) == call(
        "evaluate", f"{run.path}@best", *options
    )
    with pytest.raises(InputError, match=r"does not play Pendulum-v1: they differ in observation"):
        call("evaluate", "third/bot/2", "--env", "Pendulum-v1", *options)
    declared.write_bytes(replace(cartpole, name="other", action=Discrete(3)).to_json())
    with pytest.raises(InputError, match=r"CartPole-v1 does not play other: they differ in action \(.*n.:2,"):
        call("publish", run.path, *where, "--game", declared)
    assert Registry(tmp_path / "registry").latest("other") is None


def test_publish_says_when_the_algorithm_cannot_learn_from_people(run, tmp_path):
    cartpole = catalog.load("CartPole-v1")
    e = Experiment(
        game="CartPole-v1",
        algorithm={"name": "ppo", "layers": [], "steps": 64, "epochs": 1},
        stop=Stop(iterations=1),
        out=str(tmp_path / "ppo"),
    )
    ppo, where = loop.train(e).path, ("--registry", tmp_path / "registry")
    said = "warning: ppo cannot learn from people's play"
    assert said not in call("publish", ppo, *where)  # no platform here knows the game
    declared = tmp_path / "mine.json"
    declared.write_bytes(replace(cartpole, name="mine", env=None).to_json())
    shown = call("publish", ppo, *where, "--game", declared)
    assert said in shown
    assert "sparring settings mine --set algorithm=dqn" in shown
    assert "warning" not in call("publish", run.path, *where, "--game", declared)
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.register(cartpole)
        assert said in call("publish", ppo, *where)
        assert said not in call("publish", ppo, *where, "--model", "other")  # its trainer does not go on from that
        store.revise("CartPole-v1", lambda known: Revision(known.game, Profile(GameSettings(algorithm="dqn"))))
        assert "warning" not in call("publish", ppo, *where)  # its trainer learns with that, and so from people


def test_publish_for_a_declaration_finds_its_generation(run, tmp_path):
    pole = replace(catalog.load("CartPole-v1"), name="pole", env=None)
    old = replace(pole, observation=Box((3,)))
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.register(old)
        store.register(replace(pole, name="pole.2"))
        origin = Origin("pole", store.registration("pole"), 2, 0)
        store.revise("pole.2", lambda known: Revision(known.game, Profile(origin=origin)))
    declared = tmp_path / "pole.json"
    declared.write_bytes(pole.to_json())
    where = ("--registry", tmp_path / "registry")
    assert call("publish", run.path, *where, "--game", declared).splitlines()[0] == "pole.2/bot/1"


def test_why_there_is_no_policy_is_told_whatever_its_bytes(tmp_path):
    (tmp_path / "experiment.yaml").touch()
    (tmp_path / "no-policy.txt").write_bytes(b"it has \xff layers")
    with pytest.raises(InputError, match="no policy to play with: it has \ufffd layers"):
        Run(tmp_path).policy()


def test_every_command_takes_any_policy_that_a_run_keeps(run, tmp_path):
    assert run.kept() == ["last", "best", "4"]
    for which in ("last", "best", "4", "0004"):
        assert "return_mean" in call("evaluate", f"{run.path}@{which}")
    for command in ("evaluate", "record", "publish"):
        with pytest.raises(
            InputError, match=r"seed-1@40: there is no checkpoint of iteration 40; kept: last, best, 4$"
        ):
            call(command, f"{run.path}@40", *([tmp_path / "x.mp4"] if command == "record" else []))
        for which in ("worst", "", "-4", "9" * 100, "9" * 5_000):
            with pytest.raises(InputError, match=r"say last, best or the number .*; kept: last, best, 4$"):
                call(command, f"{run.path}@{which}", *([tmp_path / "x.mp4"] if command == "record" else []))
    best = run.best()
    assert f"{best.ret:,.1f} @{best.iteration}" in call("runs", run.path.parent)
    with pytest.raises(InputError, match="plot draws whole runs: leave out @best"):
        call("plot", f"{run.path}@best", "--out", tmp_path / "x.png")
    odd = tmp_path / "an@odd@name"
    odd.symlink_to(run.path)
    assert call("evaluate", odd) == call("evaluate", f"{odd}@last") == call("evaluate", run.path)


def test_what_is_neither_run_nor_model(tmp_path):
    with pytest.raises(InputError, match="neither a run directory nor a model"):
        call("evaluate", tmp_path, "--registry", tmp_path / "none")


def test_record_writes_a_video(run, tmp_path, monkeypatch):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    out = tmp_path / "sub" / "play.mp4"
    assert "returns" in call("record", run.path, out)
    frames = imageio_ffmpeg.read_frames(str(out))
    assert next(frames)["size"] == (600, 400)
    (length,) = [episode.length for episode in play(run.policy(), 1)]
    assert sum(1 for _ in frames) > min(length, 5)
    with pytest.raises(InputError, match=r"\.mp4"):
        call("record", run.path, tmp_path / "play.gif")


def test_videos_of_checkpoints_lie_in_the_run(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    e = Experiment(
        game="CartPole-v1",
        algorithm={"name": "ppo", "layers": [], "steps": 64, "epochs": 1},
        stop=Stop(iterations=5),
        checkpoint=Checkpoints(every=2, keep=1, video=True),
        out=str(tmp_path / "run"),
    )
    run = loop.train(e)
    assert [path.name for path in sorted((run.path / "videos").iterdir())] == [f"0000000{n}.mp4" for n in (2, 4, 5)]
    run.video(5).unlink()
    assert str(run.video(5)) in call("record", run.path)
    assert run.video(5).stat().st_size > 1000
    call("publish", run.path, "--registry", tmp_path / "registry")
    monkeypatch.chdir(tmp_path)
    call("record", "CartPole-v1/bot", "--registry", tmp_path / "registry")
    assert (tmp_path / "CartPole-v1-bot.mp4").stat().st_size > 1000


def test_a_game_without_pictures_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    e = Experiment(
        game="odd_games:Odd-v0",
        algorithm={"name": "ppo"},
        checkpoint=Checkpoints(video=True),
        out=str(tmp_path / "run"),
    )
    with pytest.raises(InputError, match="Odd-v0 draws no pictures"):
        loop.train(e)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plot_writes_a_figure(run, tmp_path, kind):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"figure.{kind}"
    call("plot", run.path, run.path.with_name("seed-2"), "--out", out)
    assert out.stat().st_size > 5000


def test_curves_have_the_shortest_names_that_differ(run, tmp_path):
    """A game's settings and whole paths would leave no room for the curves."""
    copies = [tmp_path / "one" / "run", tmp_path / "other" / "run", tmp_path / "third"]
    found = []
    for number, copy in enumerate(copies):
        shutil.copytree(run.path, copy)
        experiment = replace(run.experiment, game={"id": run.experiment.game_id}, iteration=number + 1)
        write(copy / "experiment.yaml", experiment)
        found.append(Run(copy))
    name = f"{run.experiment.name} {run.experiment.game_id}"
    assert list(groups([run])) == [name]
    assert list(groups([run, found[2]])) == [f"{name}, {run.path.name}", f"{name}, third"]
    assert list(groups(found[:2])) == [f"{name}, {copy}" for copy in copies[:2]]


def test_runs_of_one_experiment_are_one_curve(run):
    other = Run(run.path.with_name("seed-2"))
    assert [len(members) for members in groups([run, other]).values()] == [2]
    line = curve([run.rows(), other.rows()], "steps")
    assert (line.low <= line.mean).all()
    assert (line.mean <= line.high).all()


def test_a_figure_shows_every_run_or_says_why_not(run, tmp_path):
    other = Run(run.path.with_name("seed-2"))
    assert [len(members) for members in groups([run, run, other]).values()] == [2]
    late = [{"steps": x, "episode/return_mean": 1.0} for x in (5.0, 6.0)]
    early = [{"steps": x, "episode/return_mean": 1.0} for x in (1.0, 2.0)]
    assert len(curve([late, early], "steps").x) == 0  # nothing that both have
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        call("plot", run.path, "--out", tmp_path / "figure")


def test_curves_of_a_figure_show_the_same_return():
    def run(*keys):
        return SimpleNamespace(rows=lambda: [dict.fromkeys(keys, 1.0)] * 2)

    both, training = run("evaluation/return_mean", "episode/return_mean"), run("episode/return_mean")
    assert drawn_return([both, both]) == "evaluation/return_mean"
    assert drawn_return([both, training]) == "episode/return_mean"


def test_the_confidence_band_is_students():
    """Two seeds at 0 and 2: mean 1, standard error 1, t = 12.71."""
    wide = {"episode/return_min": -100.0, "episode/return_max": 100.0}
    seeds = [[{"steps": x, "episode/return_mean": y, **wide} for x in (0.0, 1.0)] for y in (0.0, 2.0)]
    line = curve(seeds, "steps")
    assert line.mean == pytest.approx(np.ones(200))
    assert line.high == pytest.approx(np.full(200, 1 + 12.71))


@pytest.mark.parametrize("kind", ["evaluation", "episode"])
def test_the_confidence_band_does_not_leave_what_was_returned(kind):
    """Two seeds at 500 and 420, which is CartPole's most: no band up to 960."""
    seeds = [
        [
            {"steps": x, f"{kind}/return_mean": y, f"{kind}/return_min": y - 30.0, f"{kind}/return_max": 500.0}
            for x in (0.0, 1.0)
        ]
        for y in (500.0, 420.0)
    ]
    line = curve(seeds, "steps", f"{kind}/return_mean")
    assert line.high == pytest.approx(np.full(200, 500.0))
    assert line.low == pytest.approx(np.full(200, 390.0))
    assert line.mean == pytest.approx(np.full(200, 460.0))


def test_event_files_are_tensorboards(tmp_path):
    """Against the format: lengths, masked CRC-32C (known answers), and our scalars in plain sight."""
    from sparring.runs.tensorboard import _masked_crc

    # CRC-32C("123456789") = 0xE3069283 (RFC 3720); masked as TFRecords do.
    crc = 0xE3069283
    assert _masked_crc(b"123456789") == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    events = EventFile(tmp_path)
    events.add(300, {"loss/q": 0.5})
    events.close()
    (path,) = tmp_path.iterdir()
    data, records = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        assert data[8:12] == _masked_crc(data[:8])
        records.append(data[12 : 12 + size])
        assert data[12 + size : 16 + size] == _masked_crc(records[-1])
        data = data[16 + size :]
    assert b"brain.Event:2" in records[0]
    assert records[1][9:] == b"\x10\xac\x02" + b"\x2a\x0f\x0a\x0d\x0a\x06loss/q\x15" + struct.pack("<f", 0.5)


@pytest.mark.parametrize("terminal", [True, False])
def test_views(run, terminal):
    from rich.console import Console

    console = Console(record=True, width=100, force_terminal=terminal, file=Path("/dev/null").open("w"))  # noqa: SIM115
    view = (Terminal if terminal else Lines)(console)
    with view.show(run.experiment, run):
        for row in run.rows():
            view.row(row)
    said = console.export_text()
    assert "dqn on CartPole-v1" in said
    assert "iteration 4" in said
    if terminal:
        for words in ("sample", "evaluation", "loss/q", "100% in 0:0", str(run.path.name), "┤"):
            assert words in said


def test_how_long_it_takes():
    row = {"steps": 25.0, "iteration": 1.0, "time/total_s": 100.0}

    def said(stop, row=row, since=20.0):
        return remaining(Experiment(game="g", algorithm={"name": "dqn"}, stop=stop), row, since)

    assert said(Stop(steps=100)) == "25% in 2:00, about 4:40 left"
    assert said(Stop(seconds=7200.0, return_=9.5)) == "1% in 2:00, about 1:58:00 left; a return of 9.5 ends it"
    assert said(Stop(steps=25)) == "100% in 2:00"
    assert said(Stop()) == "2:00, no stop condition: until Ctrl-C"
    assert said(Stop(), {}).startswith("0:20: the first iteration")


def test_sparklines():
    assert sparkline([0, 1, 2, 3.5, 7], 10) == "▁▂▃▅█  7.0"
    assert sparkline([1.0] * 50, 10) == "▁" * 10 + "  1.0"
