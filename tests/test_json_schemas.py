"""JSON Schemas: they take what Sparring takes, refuse what it refuses, and say what each key is."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from typer.testing import CliRunner

from sparring import algorithms, json_schemas
from sparring.cli.entry import app
from sparring.errors import InputError
from sparring.experiment import Experiment, parse_yaml
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, catalog
from sparring.sweep.plan import Sweep

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").rglob("*.yaml"))
SMALL = {"game": "CartPole-v1", "algorithm": {"name": "ppo"}}
SWEEP = {**SMALL, "algorithm": {"name": "ppo", "lr": {"loguniform": [1e-5, 1e-3]}}, "stop": {"steps": 1000}}


def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads(msgspec.json.encode(json_schemas.KINDS_OF_FILES[kind]()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def validators() -> dict[str, jsonschema.Draft202012Validator]:
    return {kind: validator(kind) for kind in json_schemas.KINDS_OF_FILES}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_all_experiments_fit(validators, path):
    data = parse_yaml(path.read_text(), str(path))
    searched = "tune" in data
    validators["sweep" if searched else "experiment"].validate(data)
    if searched:
        assert not validators["experiment"].is_valid(data), "an experiment has no searched values"
    else:
        validators["experiment"].validate(json.loads(json.dumps(Experiment.parse(data).to_builtins())))


def test_complete_hyperparameters_fit(validators):
    """What a run writes down: all of them."""
    for name in algorithms.ALGORITHMS:
        complete = {"name": name, **msgspec.to_builtins(algorithms.find(name).config_class())}
        validators["experiment"].validate(json.loads(json.dumps(SMALL | {"algorithm": complete})))


WRONG = {
    "a misspelt key": SMALL | {"rolout": {}},
    "a misspelt group key": SMALL | {"rollout": {"worker": 2}},
    "a misspelt hyperparameter": SMALL | {"algorithm": {"name": "ppo", "learning_rate": 1e-3}},
    "another algorithm's": SMALL | {"algorithm": {"name": "ppo", "replay": 1000}},
    "a misspelt algorithm": SMALL | {"algorithm": {"name": "pppo"}},
    "no algorithm's name": SMALL | {"algorithm": {"lr": 1e-3}},
    "a value of another type": SMALL | {"seed": "seven"},
    "a value out of range": SMALL | {"algorithm": {"name": "ppo", "lr": -1}},
    "a wrong choice": SMALL | {"runner": "slurm"},
    "no game": {"algorithm": {"name": "ppo"}},
    "a misspelt layer": SMALL | {"algorithm": {"name": "ppo", "layers": [{"layer": "dens", "units": 8}]}},
    "a misspelt activation": SMALL
    | {"algorithm": {"name": "ppo", "layers": [{"layer": "dense", "units": 8, "activation": "relo"}]}},
    "a layer's misspelt key": SMALL | {"algorithm": {"name": "ppo", "layers": [{"layer": "dense", "unit": 8}]}},
    "return_ as in Python": SMALL | {"stop": {"return_": 1.0}},
}


def create(data) -> None:
    found = Experiment.parse(data)
    algorithms.create(found.name, catalog.load(found.game), found.hyperparameters)


@pytest.mark.parametrize("case", WRONG)
def test_a_typo_is_refused(validators, case):
    assert not validators["experiment"].is_valid(WRONG[case])
    with pytest.raises(InputError):  # and Sparring agrees
        create(WRONG[case])


def test_layers_from_elsewhere_fit(validators):
    layers = [{"layer": "dense", "units": 8, "activation": "my_module:GELU"}, {"layer": "my_module:Gate", "x": 1}]
    validators["experiment"].validate(SMALL | {"algorithm": {"name": "ppo", "layers": layers}})


def test_algorithms_from_elsewhere_are_not_checked(validators):
    for name in ("rllib/PPO", "my_module:Mine"):
        validators["experiment"].validate(SMALL | {"algorithm": {"name": name, "whatever": 1}})


@pytest.mark.parametrize(
    "change",
    [
        {"seed": {"grid": [1, 2]}},
        {"rollout": {"envs": {"choice": [1, 8]}}},
        {"iteration": {"randint": [100, 1000]}},
        {"algorithm": {"name": {"choice": ["ppo", "dqn"]}}},
        {"tune": {"samples": 4, "scheduler": "none"}},
    ],
)
def test_searched_values_fit_in_sweeps_alone(validators, change):
    data = SWEEP | change
    Sweep.parse(data)
    validators["sweep"].validate(data)
    if "tune" not in change:
        assert not validators["experiment"].is_valid(data)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": {"gird": [1, 2]}},
        {"iteration": {"randint": [1.5, 3]}},
        {"stop": {"steps": {"choice": [1, 2]}}},
        {"runner": {"choice": ["local", "ray"]}},
        {"tune": {"sample": 4}},
        {"algorithm": {"name": "ppo", "learning_rate": {"choice": [1, 2]}}},
    ],
)
def test_wrong_sweeps_are_refused(validators, change):
    assert not validators["sweep"].is_valid(SWEEP | change)


def test_games_fit(validators):
    declared = Game("Arena", Dict({"at": Box((2,), low=0.0), "weapon": Discrete(3)}), MultiDiscrete((2, 3)), 2)
    for each in (declared, catalog.load("CartPole-v1"), catalog.load("Pendulum-v1")):
        validators["game"].validate(json.loads(each.to_json()))
    wrong = json.loads(declared.to_json())
    assert not validators["game"].is_valid(wrong | {"player": 2})
    assert not validators["game"].is_valid(wrong | {"action": {"type": "discreet", "n": 2}})


def test_the_command_writes_them(tmp_path):
    runner = CliRunner()
    shown = runner.invoke(app, ["schema"])
    assert json.loads(shown.stdout) == json.loads(msgspec.json.encode(json_schemas.experiment()))
    for kind in json_schemas.KINDS_OF_FILES:
        path = tmp_path / "schemas" / f"{kind}.json"
        assert runner.invoke(app, ["schema", kind, "--out", str(path)]).exit_code == 0
        assert json.loads(path.read_text())["$schema"].startswith("https://json-schema.org/")
    assert "did you mean sweep" in str(runner.invoke(app, ["schema", "sweeps"]).exception)


def test_keys_are_described():
    defs = json_schemas.experiment()["$defs"]
    ours = {"Rollout", "Resources", "Stop", "Evaluation", "Checkpoint", "Experiment"}
    for name in ours:
        for key, value in defs[name]["properties"].items():
            assert value.get("description"), f"{name}.{key}"
        assert ":param" not in defs[name]["description"]
    assert defs["Stop"]["properties"]["return"]["description"].startswith("Mean return to reach")
    for name in algorithms.ALGORITHMS:
        silent = [key for key, value in defs[name]["properties"].items() if not value.get("description")]
        assert silent == ["name"], name
    tune = json_schemas.KINDS_OF_FILES["sweep"]()["$defs"]["Tune"]["properties"]
    assert [key for key, value in tune.items() if not value.get("description")] == []
    assert "description" in defs["ppo"]["properties"]["gamma"]
