"""An experiment: one typed, frozen description of a training, the same as YAML. Whatever a file or the command line
gets wrong is told by its key, its path and the nearest right one. Light: no learning stack is loaded here."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sparring.errors import InputError

__all__ = [
    "Checkpoints",
    "Evaluation",
    "Experiment",
    "Resources",
    "Rollout",
    "Stop",
    "check_keys",
    "explain",
    "override",
    "read",
    "write",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Share = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: Count = 0  # processes that play (`source: store`: that read, with runner: ray); 0: this process
    envs: Positive = 1  # environments of each worker, stepped together
    steps: Positive | None = None  # of each environment that travel at once; none: chosen for the algorithm
    overlap: bool = False  # on-policy: play the next batch with the old policy while this one is learned
    limit: Seconds = 60.0  # a worker whose game answers later than this is killed and replaced


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `runner: ray` may use."""

    address: str | None = None  # of a cluster; none: one of our own on this machine
    cpus: Positive | None = None  # of a cluster of our own; none: as many as the machine has
    actor_cpus: Share = 1.0  # of each rollout actor; parts are fine
    actor_gpus: Share = 0.0
    learner_gpus: Share | None = None  # of each trial of a sweep; none: equal parts of those there are
    devices: Positive = 1  # on which an update is computed together, each with its part of the batch

    def __post_init__(self) -> None:
        if self.learner_gpus is not None and self.learner_gpus > 1 and self.learner_gpus % 1:
            raise ValueError(
                f"learner_gpus is {self.learner_gpus:g}: parts of one GPU, or whole ones, such as 0.5 or 2"
            )


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whichever comes first."""

    steps: Positive | None = None
    iterations: Positive | None = None
    seconds: Seconds | None = None
    return_: float | None = msgspec.field(name="return", default=None)  # by evaluation; without one, while exploring


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    every: Count = 0  # iterations; 0: never
    episodes: Positive = 10
    limit: Positive | None = None  # steps after which an episode is cut; none: see docs/training.md


class Checkpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    every: Count = 20  # iterations; 0: only at the end
    keep: Positive = 2
    best: bool = True  # keep the best evaluated policy as well
    video: bool = False  # an episode of each, in the run's videos/; these are all kept


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    game: str  # a Gymnasium id or the path of a declaration
    algorithm: dict[str, Any]  # `name` and the hyperparameters that differ from the algorithm's own
    source: Literal["simulate", "store"] = "simulate"
    store: str | None = None  # of `source: store`: a data directory, a file, or cassandra://HOST/KEYSPACE
    rollout: Rollout = Rollout()
    runner: Literal["local", "ray"] = "local"  # who runs rollout workers: this machine, or a Ray cluster
    resources: Resources = Resources()
    precision: Literal["float32", "bfloat16"] = "float32"  # of wide layers' products while learning; sums are float32
    iteration: Positive = 1000  # off-policy: steps of experience (offline: updates) per row of metrics
    stop: Stop = Stop()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoints = Checkpoints()
    seed: Seed = 0
    out: str | None = None  # the run's directory; none: the next free one under runs/

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, dict) or not isinstance(self.algorithm.get("name"), str):
            raise ValueError("algorithm.name is missing: say which algorithm, such as {name: ppo}")
        if self.runner == "ray" and self.rollout.workers == 0:
            raise ValueError("runner: ray plays in actors: say how many with rollout.workers")
        if self.source == "store" and self.store is None:
            raise ValueError("store is missing: where are the fragments? (a data directory, such as .sparring)")

    @property
    def name(self) -> str:
        return str(self.algorithm["name"])

    @property
    def axis(self) -> str:
        """The metric that tells how far a run is: nobody plays while it learns from a store."""
        return "updates" if self.source == "store" else "steps"

    @property
    def is_rllib(self) -> bool:
        return self.name.startswith("rllib/")

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return {key: value for key, value in self.algorithm.items() if key != "name"}

    @classmethod
    def parse(cls, data: Any) -> "Experiment":
        """Checked; hyperparameters are checked by their algorithm, when it is created."""
        if not isinstance(data, dict):
            raise InputError("an experiment is a mapping with at least `game` and `algorithm`")
        refuse_sweep(data)
        check_keys(data, cls, "")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise InputError(explain(error)) from error

    def to_builtins(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def read(path: Path, overrides: Iterable[str] = ()) -> Experiment:
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
    import yaml

    new = path.with_name(path.name + ".new")  # whole or not at all: a run without its experiment cannot be resumed
    new.write_text(yaml.safe_dump(experiment.to_builtins(), sort_keys=False, default_flow_style=None))
    new.replace(path)


def override(data: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """`algorithm.lr=1e-3` and the like, applied to a copy."""
    data = msgspec.to_builtins(data)  # a deep copy
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {change}: write key=value, such as --set algorithm.lr=1e-3")
        *parents, last = key.strip().split(".")
        place = data
        for depth, parent in enumerate(parents):
            if not isinstance(place.setdefault(parent, {}), dict):
                raise InputError(f"--set {change}: {'.'.join(parents[: depth + 1])} is a value, not a group of keys")
            place = place[parent]
        place[last] = parse_yaml(value, f"--set {change}")
    return data


def parse_yaml(text: str, where: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
        pass

    def number(loader: Any, node: Any) -> float:
        value: float = loader.construct_yaml_float(node)
        return int(value) if "e" in node.value.lower() and value.is_integer() else value

    # YAML 1.1 reads 1e-3 as text, for want of a dot. Everybody means a number, and by 1e6 a whole one.
    Loader.add_constructor("tag:yaml.org,2002:float", number)
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
    )
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise InputError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def check_keys(data: dict[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    """msgspec names an unknown key, but neither its neighbours nor the right one."""
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    hints = get_type_hints(kind)
    for key, value in data.items():
        full = f"{path}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f"did you mean {path}{near[0]}?" if near else f"there are {', '.join(fields)}"
            raise InputError(f"unknown key {full}: {hint}")
        inner = hints[fields[key]]
        if get_origin(inner) is Literal and value not in get_args(inner):
            raise InputError(f"{full} is {value!r}: choose one of {', '.join(get_args(inner))}")
        if get_origin(inner) is None and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise InputError(f"{full} is {value!r}, but a group of keys: {', '.join(f for f in _names(inner))}")
            check_keys(value, inner, f"{full}.")


def refuse_sweep(data: dict[str, Any]) -> None:
    from sparring.search_space import find

    searched = next((axis.name for axis in find(data)), None)
    if searched is not None or "tune" in data:
        why = "it has `tune`" if searched is None else f"{searched} is searched"
        raise InputError(f"this is a sweep ({why}): use `sparring sweep`")


def _names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def explain(error: msgspec.ValidationError) -> str:
    """'Expected `int`, got `str` - at `$.rollout.workers`' → 'rollout.workers: expected `int`, got `str`'."""
    message, at, path = str(error).rpartition(" - at `$.")
    if not at:
        return str(error)
    return f"{path.rstrip('`')}: {message[0].lower()}{message[1:]}"
