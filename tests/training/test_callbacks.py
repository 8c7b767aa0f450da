"""Callbacks: message at the right moments, able to end a training from any thread, and never able to lose a run."""

import sys
import threading
from pathlib import Path

import pytest

import sparring
from sparring.errors import InputError
from sparring.experiment import Checkpoint, Evaluation, Experiment, Rollout, Stop
from sparring.runs.run import Run

DQN = {"name": "dqn", "layers": [{"layer": "dense", "units": 8}], "learning_starts": 64, "batch": 16, "replay": 3000}


def experiment(out: Path, **changes) -> Experiment:
    fields = {
        "game": "CartPole-v1",
        "algorithm": DQN,
        "rollout": Rollout(envs=4, steps=8),
        "iteration": 64,
        "stop": Stop(iterations=4),
        "checkpoint": Checkpoint(every=2),
        "out": str(out),
    }
    return Experiment(**(fields | changes))


class Diary(sparring.Callback):
    def __init__(self) -> None:  # without super().__init__(): people forget it
        self.heard: list[tuple[str, int]] = []
        self.last: sparring.Progress | None = None

    def note(self, hook: str, progress: sparring.Progress) -> None:
        self.heard.append((hook, progress.iteration))
        self.last = progress

    def on_start(self, progress):
        self.note("start", progress)

    def on_iteration(self, progress):
        self.note("iteration", progress)
        assert progress.row["iteration"] == progress.iteration
        assert progress.run.rows()[-1]["steps"] == progress.steps

    def on_evaluation(self, progress):
        self.note("evaluation", progress)
        assert "evaluation/return_mean" in progress.row

    def on_checkpoint(self, progress):
        self.note("checkpoint", progress)
        assert progress.checkpoint is not None
        assert int(progress.checkpoint.name) == progress.iteration
        assert (progress.run.path / "policy.onnx").exists()

    def on_end(self, progress):
        self.note("end", progress)


def test_hooks_are_called_in_order(tmp_path):
    diary = Diary()
    wanted = experiment(tmp_path / "run", stop=Stop(iterations=3), evaluation=Evaluation(every=3, episodes=1))
    run = sparring.train(wanted, callbacks=[diary])
    assert diary.heard == [
        ("start", 0), ("iteration", 1), ("iteration", 2), ("checkpoint", 2), ("evaluation", 3), ("iteration", 3),
        ("checkpoint", 3), ("end", 3),
    ]  # fmt: skip
    assert diary.last is not None
    assert diary.last.run.path == run.path
    assert diary.last.steps == run.rows()[-1]["steps"]
    assert diary.last.updates > 0
    diary.heard.clear()
    sparring.resume(run, ["stop.iterations=4"], callbacks=[diary])
    assert diary.heard == [("start", 3), ("iteration", 4), ("checkpoint", 4), ("end", 4)]


class Enough(sparring.Callback):
    def on_iteration(self, progress):
        return progress.iteration < 2


def test_false_ends_the_training_saved_and_resumable(tmp_path, caplog):
    enough = Enough()
    run = sparring.train(experiment(tmp_path / "run"), callbacks=[enough])
    assert len(run.rows()) == 2
    assert int(run.checkpoints()[-1].name) == 2
    assert "stop condition" not in caplog.text
    again = sparring.train(experiment(tmp_path / "again"), callbacks=[enough])
    assert len(again.rows()) == 2, "a callback that ended one training ends another when it says so, not at once"
    assert len(sparring.resume(run.path).rows()) == 4
    assert "stop condition" not in caplog.text
    sparring.resume(run.path)
    assert "is at its stop condition stop.iterations (4): raise it with --set stop.iterations=…" in caplog.text


def test_stop_from_another_thread(tmp_path):
    class Waits(sparring.Callback):
        def __init__(self) -> None:
            self.begun = threading.Event()

        def on_iteration(self, progress):
            self.begun.set()

    callback, done = Waits(), []
    endless = experiment(tmp_path / "run", stop=Stop(seconds=120))
    thread = threading.Thread(target=lambda: done.append(sparring.train(endless, callbacks=[callback])))
    thread.start()
    assert callback.begun.wait(60)
    callback.stop()
    thread.join(60)
    assert not thread.is_alive()
    (run,) = done
    assert int(run.checkpoints()[-1].name) == len(run.rows())


def test_stop_before_the_beginning_counts(tmp_path):
    callback = Diary()
    callback.stop()
    run = sparring.train(experiment(tmp_path / "run"), callbacks=[callback])
    assert run.rows() == []
    assert [hook for hook, _ in callback.heard] == ["start", "checkpoint", "end"]


@pytest.mark.parametrize("hook", ["on_start", "on_iteration", "on_checkpoint", "on_end"])
def test_a_failing_callback_ends_the_run_saved(tmp_path, hook):
    class Careless(sparring.Callback):
        pass

    def fail(self, progress):
        if progress.iteration >= 2 or hook == "on_start":
            raise ZeroDivisionError("what a day")

    setattr(Careless, hook, fail)
    diary = Diary()
    with pytest.raises(sparring.CallbackError, match=rf"Careless failed in {hook}: ZeroDivisionError: what a day") as e:
        sparring.train(experiment(tmp_path / "run"), callbacks=[Careless(), diary])
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert diary.heard[-1][0] == "end", "the others are still message of the end"
    run = Run(tmp_path / "run")
    assert int(run.checkpoints()[-1].name) == len(run.rows()) == {"on_start": 0, "on_end": 4}.get(hook, 2)
    assert "ZeroDivisionError" in (run.path / "callback.log").read_text()
    assert len(sparring.resume(run).rows()) == 4


def test_of_several_that_fail_at_the_end_none_is_lost(tmp_path, caplog):
    class First(sparring.Callback):
        def on_end(self, progress):
            raise ValueError("first")

    class Second(First):
        def on_end(self, progress):
            raise ValueError("second")

    with pytest.raises(sparring.CallbackError, match="first"):
        sparring.train(experiment(tmp_path / "run", stop=Stop(iterations=1)), callbacks=[First(), Second()])
    assert "second" in caplog.text


OWN = """
import sparring

class Mine(sparring.Callback):
    def on_end(self, progress):
        (progress.run.path / "mine.txt").write_text(str(progress.iteration))

def make():
    return Mine()

instance = Mine()
class Not: pass
def broken(): raise RuntimeError("no such luck")
"""


@pytest.mark.parametrize("name", ["Mine", "make", "instance"])
def test_callbacks_of_an_experiment_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"own_callbacks_{name}"
    (tmp_path / f"{module}.py").write_text(OWN)
    run = sparring.train(experiment(tmp_path / "run", stop=Stop(iterations=1), callbacks=(f"{module}:{name}",)))
    assert (run.path / "mine.txt").read_text() == "1"
    assert run.experiment.callbacks == (f"{module}:{name}",)
    sparring.resume(run, ["stop.iterations=2"])  # it goes with the run
    assert (run.path / "mine.txt").read_text() == "2"
    (run.path / "mine.txt").unlink()
    sparring.resume(run, ["stop.iterations=3", "callbacks=[]"])
    assert not (run.path / "mine.txt").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("patience", "write where it is, as module:Name"),
        ("own_wrong:Min", "did you mean 'Mine'"),
        ("own_wrong:Not", "it must be a sparring.Callback"),
        ("own_wrong:broken", "cannot be made: RuntimeError: no such luck"),
        ("nowhere_at_all:Mine", "cannot import 'nowhere_at_all'"),
    ],
)
def test_wrong_callbacks_are_refused_before_anything_is_written(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_wrong.py").write_text(OWN)
    with pytest.raises(InputError, match=why):
        sparring.train(experiment(tmp_path / "run", callbacks=(name,)))
    assert not (tmp_path / "run").exists()


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"must be an instance of sparring\.Callback"):
        sparring.train(experiment(tmp_path / "run"), callbacks=[Enough])  # the class: people forget the parentheses
