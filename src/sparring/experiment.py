"""An experiment: one typed, frozen description of a training, the same as YAML. Whatever a file or the command line
gets wrong is named by its key, its path and the nearest right one. Light: no learning stack is loaded here."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sparring.errors import InputError
from sparring.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, convert
from sparring.files import write_whole

__all__ = [
    "CHANGEABLE",
    "Checkpoint",
    "Checkpoints",
    "Evaluation",
    "Experiment",
    "Metering",
    "Resources",
    "Rollout",
    "Stop",
    "changed_key",
    "override",
    "read",
    "unchangeable",
    "write",
]

# What an experiment that has begun can change.
CHANGEABLE = ("stop", "evaluation", "checkpoint", "runner", "resources", "callbacks", "metrics", "metering")

Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How experience is collected.

    :param workers: Processes that play (`source: store` with `runner: ray`: that read). 0: the training process plays.
    :param envs: Environments of each worker, stepped together.
    :param steps: Steps of each environment that are sent at once. None: chosen for the algorithm.
    :param overlap: On-policy: collect the next batch with the old policy while the learner trains on this one.
    :param limit: Seconds after which a worker whose game does not answer is killed and replaced.
    """

    workers: NonNegativeInt = 0
    envs: PositiveInt = 1
    steps: PositiveInt | None = None
    overlap: bool = False
    limit: PositiveFloat = 60.0


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run may use.

    :param gpu: On which GPUs it is learned: `none`, `all` (or `both`), or numbers such as 0 or 0,1. None: JAX's choice.
    :param affinity: Numbers of the CPUs that the run may use, its workers too. None: all.
    :param address: Address of a Ray cluster. None: a cluster of its own on this machine.
    :param cpus: CPUs of a cluster of its own. None: as many as the machine has.
    :param actor_cpus: CPUs of each rollout actor; parts are fine.
    :param actor_gpus: GPUs of each rollout actor; parts are fine.
    :param learner_gpus: GPUs of each trial of a sweep. None: equal parts of those there are. Of a run: the part of a
        GPU's memory that its learner takes.
    :param devices: Devices on which an update is computed together, each with its part of the batch. `gpu` says it too.
    """

    gpu: str | int | None = None
    affinity: Annotated[tuple[NonNegativeInt, ...], msgspec.Meta(min_length=1)] | None = None
    address: str | None = None
    cpus: PositiveInt | None = None
    actor_cpus: NonNegativeFloat = 1.0
    actor_gpus: NonNegativeFloat = 0.0
    learner_gpus: NonNegativeFloat | None = None
    devices: PositiveInt = 1

    def __post_init__(self) -> None:
        gpus = self.gpus
        if gpus is not None and self.devices > 1 and self.devices != len(gpus):
            raise ValueError(f"gpu is {self.gpu}, devices is {self.devices}: leave devices out")
        if self.learner_gpus is not None and self.learner_gpus > 1 and self.learner_gpus % 1:
            raise ValueError(
                f"learner_gpus is {self.learner_gpus:g}: parts of one GPU, or whole ones, such as 0.5 or 2"
            )

    @property
    def gpus(self) -> tuple[int, ...] | None:
        """`gpu` as numbers; none of them for `none`, None where it names no numbers."""
        if self.gpu is None or self.gpu in ("all", "both"):
            return None
        if self.gpu == "none":
            return ()
        words = str(self.gpu).split(",")
        if not all(word.strip().isdecimal() for word in words) or len({*map(int, words)}) < len(words):
            raise ValueError(f"gpu is {self.gpu!r}: write none, all, both, or numbers of GPUs such as 0 or 0,1")
        return tuple(map(int, words))


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a run ends: whichever condition holds first. Without any it goes on until it is interrupted.

    :param steps: Steps of play.
    :param iterations: Rows of metrics.
    :param seconds: Seconds of training, across resumes.
    :param return_: Mean return to reach (`return` in files): that of evaluations; without evaluation, of recent
        episodes of training.
    """

    steps: PositiveInt | None = None
    iterations: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    return_: float | None = msgspec.field(name="return", default=None)


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the policy is evaluated while it learns: whole episodes without exploration.

    :param every: Iterations between evaluations. 0: never.
    :param episodes: Episodes of each evaluation.
    :param limit: Steps after which an episode is cut. None: see docs/training.md.
    """

    every: NonNegativeInt = 0
    episodes: PositiveInt = 10
    limit: PositiveInt | None = None


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When and what is saved.

    :param every: Iterations between checkpoints. 0: only at the end.
    :param keep: Checkpoints that are kept, the newest ones.
    :param best: Keep the best evaluated policy as well.
    :param video: Record an episode at each checkpoint into the run's `videos/`. All videos are kept.
    """

    every: NonNegativeInt = 20
    keep: PositiveInt = 2
    best: bool = True
    video: bool = False


class Metering(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is noted of the training's own costs: `usage/…` and `energy/…` of its metrics.

    :param every: Seconds between looks at CPU, memory, GPUs and energy. 0: never.
    :param meter: A command that prints the power in watts, run for each look: a power meter.
    :param estimate: Let CodeCarbon estimate energy, if it is installed, where nothing measures it.
    """

    every: NonNegativeFloat = 1.0
    meter: str | None = None
    estimate: bool = True


Checkpoints = Checkpoint  # its name in 0.1


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training, described completely: the same as an experiment's YAML file.

    :param game: A Gymnasium id, `module:Id` of a game of your own, or the path of a declaration (.json). Or a mapping
        with it as `id`, what the game is set to, and a `name` if it shall have another one:
        `{id: LunarLander-v3, gravity: -5, name: moon}`.
    :param algorithm: `name`, and the hyperparameters that differ from the algorithm's own.
    :param source: Where experience comes from: `simulate` plays the game, `store` reads recorded play.
    :param store: Address of the store for `source: store`: a data directory, a file, or cassandra://HOST/KEYSPACE.
    :param rollout: How experience is collected.
    :param runner: Who runs rollout workers: `local` (this machine) or `ray` (a Ray cluster).
    :param resources: What `runner: ray` may use.
    :param precision: Precision of wide layers' products while learning; sums are float32.
    :param iteration: Off-policy: steps of experience per row of metrics. Offline: updates.
    :param stop: When the run ends.
    :param evaluation: How the policy is evaluated while it learns.
    :param checkpoint: When and what is saved.
    :param callbacks: Callbacks as `module:Name`, each a class of `sparring.Callback` that takes no arguments.
    :param metrics: Where the rows of metrics go: csv, jsonl, study, tensorboard, mlflow, wandb, or `module:Class`.
        `jsonl` is always there: the run reads it itself.
    :param metering: What is noted of the training's own costs.
    :param seed: Of everything random.
    :param out: Directory of the run. None: the next free one under runs/.
    """

    game: str | dict[str, Any]
    algorithm: dict[str, Any]
    source: Literal["simulate", "store"] = "simulate"
    store: str | None = None
    rollout: Rollout = Rollout()
    runner: Literal["local", "ray"] = "local"
    resources: Resources = Resources()
    precision: Literal["float32", "bfloat16"] = "float32"
    iteration: PositiveInt = 1000
    stop: Stop = Stop()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    callbacks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("csv", "jsonl", "tensorboard")
    metering: Metering = Metering()
    seed: Seed = 0
    out: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.game, dict):
            if not isinstance(self.game.get("id"), str):
                raise ValueError("game.id is missing: say which game, such as {id: LunarLander-v3, gravity: -5}")
            if len(self.game) == 1:
                msgspec.structs.force_setattr(self, "game", self.game["id"])
        if not isinstance(self.algorithm, dict) or not isinstance(self.algorithm.get("name"), str):
            raise ValueError("algorithm.name is missing: say which algorithm, such as {name: ppo}")
        if self.runner == "ray" and self.rollout.workers == 0:
            raise ValueError("runner: ray plays in actors: say how many with rollout.workers")
        if "jsonl" not in self.metrics:
            raise ValueError("metrics lacks jsonl: plots, `sparring runs` and --resume read the run's rows from it")
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics names a sink twice: {', '.join(self.metrics)}")
        if self.source == "store" and self.store is None:
            raise ValueError("store is missing: where are the fragments? (a data directory, such as .sparring)")

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return str(self.algorithm["name"])

    @property
    def game_id(self) -> str:
        """The game without what it is set to."""
        return str(self.game["id"]) if isinstance(self.game, dict) else self.game

    @property
    def game_words(self) -> str:
        """The game for titles: `LunarLander-v3 (gravity -5)`."""
        if isinstance(self.game, str):
            return self.game
        settings = {key: value for key, value in self.game.items() if key != "id"}
        words = [f"{key} {'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in settings.items()]
        return f"{self.game_id} ({', '.join(words)})"

    @property
    def axis(self) -> str:
        """The metric that tells how far a run is: nobody plays while it learns from a store."""
        return "updates" if self.source == "store" else "steps"

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """`algorithm` without its name."""
        return {key: value for key, value in self.algorithm.items() if key != "name"}

    @classmethod
    def parse(cls, data: Any) -> "Experiment":
        """An experiment from plain data, as a YAML file has it.

        :param data: A mapping with at least `game` and `algorithm`. Hyperparameters are checked later, by their
            algorithm.
        :raises InputError: a key is unknown or a value does not fit; the message names the key and the nearest one.
        """
        if not isinstance(data, dict):
            raise InputError("an experiment is a mapping with at least `game` and `algorithm`")
        refuse_sweep(data)
        if isinstance(name := data.get("algorithm"), str):
            raise InputError(f"algorithm is {name!r}: write {{name: {name}}}, with its hyperparameters beside the name")
        return convert(data, cls)

    def to_builtins(self) -> dict[str, Any]:
        """As plain data, for YAML or JSON; `parse` reads it back."""
        return msgspec.to_builtins(self)


def read(path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a YAML file.

    :param path: The file.
    :param overrides: Changes written as for `--set`, such as `algorithm.lr=1e-3`.
    :raises InputError: the file cannot be read, or is no experiment.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the experiment {path}: {error}") from error
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path} is not an experiment: it needs at least `game:` and `algorithm:`")
    try:
        return Experiment.parse(override(data, overrides))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def write(path: Path, experiment: Experiment) -> None:
    """Writes the experiment as YAML, whole or not at all.

    :param path: The file.
    :param experiment: What `read` gives back.
    """
    import yaml

    text = yaml.safe_dump(experiment.to_builtins(), sort_keys=False, default_flow_style=None)
    write_whole(path, text.encode())  # a run without its experiment cannot be resumed


def override(data: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """`algorithm.lr=1e-3` and the like, applied to a copy."""
    data = msgspec.to_builtins(data)  # a deep copy
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {change}: write key=value, such as --set algorithm.lr=1e-3")
        *parents, last = key.strip().split(".")
        place = data
        if parents == ["game"] and isinstance(data.get("game"), str):
            data["game"] = {"id": data["game"]}
        for depth, parent in enumerate(parents):
            if not isinstance(place.setdefault(parent, {}), dict):
                raise InputError(f"--set {change}: {'.'.join(parents[: depth + 1])} is a value, not a group of keys")
            place = place[parent]
        place[last] = parse_yaml(value, f"--set {change}")
    return data


def parse_yaml(text: str, where: str) -> Any:
    import yaml

    class YamlLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
        pass

    def number(loader: Any, node: Any) -> float:
        value: float = loader.construct_yaml_float(node)
        return int(value) if "e" in node.value.lower() and value.is_integer() else value

    # YAML 1.1 reads 1e-3 as text, for want of a dot. Everybody means a number, and by 1e6 a whole one.
    YamlLoader.add_constructor("tag:yaml.org,2002:float", number)
    YamlLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
    )
    try:
        return yaml.load(text, YamlLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # 2020-99-99
        raise InputError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def refuse_sweep(data: dict[str, Any]) -> None:
    from sparring.search_space import find

    searched = next((axis.name for axis in find(data)), None)
    if searched is not None or "tune" in data:
        why = "it has `tune`" if searched is None else f"{searched} is searched"
        raise InputError(f"this is a sweep ({why}): use `sparring sweep`")


def unchangeable(experiment: Experiment) -> dict[str, Any]:
    return {key: value for key, value in experiment.to_builtins().items() if key not in (*CHANGEABLE, "out")}


def changed_key(before: Any, now: Any, path: str = "") -> str | None:
    """The first key of `before` that is something else now; keys that are new since do not count."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None if before == now else f"{path} was {before!r}, is {now!r}"
    found = (changed_key(value, now.get(key), f"{path}.{key}" if path else key) for key, value in before.items())
    return next((each for each in found if each is not None), None)
