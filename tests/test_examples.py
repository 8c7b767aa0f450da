"""Every program of examples/ runs, with a tiny budget, as a person would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparring

EXAMPLES = Path(__file__).parents[1] / "examples"
# words, and what it prints; "{run}" is the directory of a trained run
BUDGETS = {
    "train_and_play": (["--steps", "256", "--episodes", "2", "--out", "run"], r"an episode of the published policy"),
    "record_play": (["--episodes", "2"], r"(\d+) steps recorded, all of them sent\nthe store has \d+ fragments, \1 "),
    "load_policy": (["{run}", "--rows", "2"], r"values: \[-?\d"),
    "callback": (["--iterations", "2", "--out", "run"], r"ended after 2 iterations, 1,\d+ steps"),
    "own_game": (["--steps", "3000", "--out", "run"], r"mean return -?\d\.\d\d, success \d+%"),
    "arena": (["--episodes", "20"], r"a person makes 4\d\.\d points, chance -\d\.\d"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("examples") / "run"
    stop, algorithm = sparring.Stop(iterations=1), {"name": "dqn", "learning_starts": 32}
    experiment = sparring.Experiment("CartPole-v1", algorithm, iteration=64, stop=stop, out=str(out))
    return sparring.train(experiment).path


@pytest.mark.parametrize("name", BUDGETS)
def test_example(name, trained, tmp_path):
    words, wanted = BUDGETS[name]
    argv = [sys.executable, str(EXAMPLES / f"{name}.py"), *(word.format(run=trained) for word in words)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(wanted, done.stdout), done.stdout


def test_the_arena_declares_itself(tmp_path):
    """What it prints is a declaration of the same spaces: a platform that cannot simulate it learns it from play."""
    argv = [sys.executable, str(EXAMPLES / "arena.py"), "--declare"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    game = sparring.Game.declared(done.stdout)
    assert (game.name, game.env) == ("arena", None)
    assert game.action == sparring.MultiDiscrete((5, 2))


def test_a_callback_of_the_examples_in_a_file(tmp_path):
    """As its docstring says: by name, from the directory that has it."""
    text = "game: CartPole-v1\nalgorithm: {name: dqn, learning_starts: 32}\niteration: 64\nstop: {iterations: 1}\n"
    (tmp_path / "e.yaml").write_text(f"{text}callbacks: ['callback:Diary']\nout: {tmp_path / 'run'}\n")
    argv = [sys.executable, "-m", "sparring.cli", "train", str(tmp_path / "e.yaml")]
    done = subprocess.run(argv, cwd=EXAMPLES, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended after 1 iterations" in done.stdout


def test_all_examples_are_listed():
    page = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert {f"{name}.py" for name in BUDGETS} <= names
    for name in names:
        assert f"[{name}]({name})" in page
