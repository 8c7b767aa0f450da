"""Many environments of one game behind one interface: a native vector form where the game has one, else several
separate environments stepped in turn. Knows nothing of learning.

The step after an episode's end ignores its action and starts the next episode (Gymnasium's NEXT_STEP). So an episode's
last observation is a row like any other, and nothing ever needs a second "final" observation beside it.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparring.errors import InputError, SparringError
from sparring.games.atari_settings import AtariSettings
from sparring.games.catalog import accepted, fault, make, own_fault, register, space_of
from sparring.games.spec import Array, Box, Dict, Discrete, Game, Space

__all__ = ["Environments", "Native", "Separate", "VectorStep", "build", "clips_rewards", "scalars"]

MASK = "action_mask"  # of `info`: which actions are allowed
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")  # of a number in `info` that becomes a metric


class VectorStep(NamedTuple):
    """Columns with an element per environment. Where the step before ended an episode, `obs` is the next episode's
    first, the reward is 0 and nothing ended: not a transition."""

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    infos: dict[int, dict[str, float]] = {}  # noqa: RUF012  # never changed; numbers in `info` of episodes that ended


class Environments(Protocol):
    count: int
    masked: bool  # the game says in `info` which actions are allowed

    def reset(self, seed: int) -> Array: ...

    def step(self, actions: Array) -> VectorStep: ...

    def state(self) -> dict[str, Array] | None:
        """What `restore` needs to go on identically; none where the game cannot tell."""

    def restore(self, state: dict[str, Array]) -> Array | None:
        """The current observations, as if nothing had happened since `state`; none where it comes out otherwise."""

    def close(self) -> None: ...


def build(game: Game, count: int) -> Environments:
    """The quickest form that the game has."""
    if game.env is None:
        raise InputError(f"{game.name} is a declared game: it cannot be simulated, learn it from a store")
    return (native(game, count) if count > 1 else None) or Separate(game, count)


REPLAYED = 50_000  # steps of an episode that are remembered, to play it again


class Separate:
    """Environments of their own, one after the other. Each episode has its own seed, so (seed, actions so far) is an
    environment's whole state: restoring replays the current episode, where it is not too long for that."""

    def __init__(self, game: Game, count: int) -> None:
        assert game.env is not None
        self.game, self.count = game, count
        self.envs = [make(game) for _ in range(count)]
        self.masked = False
        self._obs = np.zeros(count, game.observation.element)
        self._action_shape = self.envs[0].action_space.shape
        self._seed = 0
        self._episode = np.zeros(count, np.int64)
        self._ended = np.zeros(count, bool)
        self._fresh = np.ones(count, bool)  # nothing was played of its episode yet
        self._actions: list[list[Array]] = [[] for _ in range(count)]

    def reset(self, seed: int) -> Array:
        self._seed = seed
        self._episode[:] = 0
        for i in range(self.count):
            self._begin(i)
        return self._obs.copy()

    def step(self, actions: Array) -> VectorStep:
        try:  # not `own_fault`, which takes a microsecond
            return self._step(actions)
        except SparringError:
            raise
        except (Exception, SystemExit) as error:
            raise fault(str(self.game.env), "step", error) from error

    def _step(self, actions: Array) -> VectorStep:
        reward = np.zeros(self.count, np.float32)
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        infos: dict[int, dict[str, float]] = {}
        for i, env in enumerate(self.envs):
            if self._ended[i]:
                self._episode[i] += 1
                self._begin(i)
                continue
            if len(self._actions[i]) <= REPLAYED:
                self._actions[i].append(actions[i])
            obs, reward[i], terminated[i], truncated[i], info = env.step(self._native(actions[i]))
            if self._fresh[i]:
                self._fresh[i] = False
                require_form(self.game, obs)
                self.masked = self.masked or has_mask(info)
            if terminated[i] or truncated[i]:
                infos[i] = scalars(info)
            put(self.game.observation, self._obs, i, obs)
        self._ended = terminated | truncated
        return VectorStep(self._obs.copy(), reward, terminated, truncated, infos)

    @property
    def has_time_limit(self) -> bool:
        """Whether every episode ends, whoever plays."""
        env = self.envs[0]
        spec = getattr(env, "spec", None)
        return getattr(env, "has_time_limit", False) or (spec is not None and spec.max_episode_steps is not None)

    def cut(self, i: int) -> None:
        """Ends an environment's episode here: its next step begins another."""
        self._ended[i] = True

    def _begin(self, i: int) -> None:
        seed = np.random.SeedSequence((self._seed, i, int(self._episode[i]))).generate_state(1)[0]
        with own_fault(str(self.game.env), "reset"):
            self._take(i, self.envs[i].reset(seed=int(seed)))
        self._ended[i], self._fresh[i] = False, True
        self._actions[i] = []

    def _take(self, i: int, answer: Any) -> None:
        """What `reset` returned."""
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise InputError(f"{self.game.name}: reset must return an observation and a dict, it gave {answer!r:.80}")
        require_form(self.game, answer[0])
        self.masked = self.masked or has_mask(answer[1])
        put(self.game.observation, self._obs, i, answer[0])

    def _native(self, action: Array) -> Any:
        if isinstance(self.game.action, Discrete):
            return int(action)
        return action.reshape(self._action_shape)

    def state(self) -> dict[str, Array] | None:
        if max(len(actions) for actions in self._actions) > REPLAYED:
            return None
        played = [action for actions in self._actions for action in actions]
        return {
            "seed": np.array(self._seed, np.int64),
            "episode": self._episode.copy(),
            "ended": self._ended.copy(),
            "length": np.array([len(actions) for actions in self._actions]),
            "actions": np.array(played, self.game.action.element.base).reshape(-1, *self.game.action.element.shape),
            "obs": np.frombuffer(self._obs.tobytes(), np.uint8),
        }

    def restore(self, state: dict[str, Array]) -> Array | None:
        if len(state["episode"]) != self.count:
            raise InputError(f"the state of {len(state['episode'])} environments does not fit {self.count}")
        self._seed = int(state["seed"])
        self._episode = state["episode"].copy()
        ends = np.cumsum(state["length"])
        for i, env in enumerate(self.envs):
            self._begin(i)
            over = False
            for action in state["actions"][ends[i] - state["length"][i] : ends[i]]:
                if over:
                    return None  # it ended earlier than it did
                self._actions[i].append(action)
                with own_fault(str(self.game.env), "step"):
                    obs, _, terminated, truncated, _ = env.step(self._native(action))
                    put(self.game.observation, self._obs, i, obs)
                over = terminated or truncated
        self._ended = state["ended"].copy()
        same = "obs" not in state or self._obs.tobytes() == state["obs"].tobytes()  # older states lack it
        return self._obs.copy() if same else None

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Native:
    """A game that steps many environments by itself."""

    def __init__(self, game: Game, env: Any) -> None:
        self.game, self.env, self.count = game, env, int(env.num_envs)
        self.masked = False

    def reset(self, seed: int) -> Array:
        with own_fault(str(self.game.env), "reset"):
            obs, info = self.env.reset(seed=seed)
        self.masked = self.masked or has_mask(info)
        return self._column(obs)

    def step(self, actions: Array) -> VectorStep:
        with own_fault(str(self.game.env), "step"):  # a microsecond, for many environments
            obs, reward, terminated, truncated, info = self.env.step(actions)
        infos = self._infos(info, terminated | truncated) if info else {}
        return VectorStep(self._column(obs), reward, terminated, truncated, infos)

    def _infos(self, info: dict[str, Any], ended: Array) -> dict[int, dict[str, float]]:
        """Gymnasium's vector form: a column for each name, and `_name` says for whom it counts."""
        self.masked = self.masked or has_mask(info)
        columns = {
            name: (column, info.get(f"_{name}"))
            for name, column in info.items()
            if not name.startswith("_") and np.shape(column) == (self.count,)
        }
        return {
            int(i): scalars({name: column[i] for name, (column, has) in columns.items() if has is None or has[i]})
            for i in np.flatnonzero(ended)
        }

    def _column(self, obs: Any) -> Array:
        return np.asarray(obs, self.game.observation.element.base)

    def state(self) -> dict[str, Array] | None:
        """Gymnasium's NumPy games keep all they know in arrays and one generator."""
        if not isinstance(getattr(self.env.unwrapped, "state", None), np.ndarray):
            return None
        arrays = {k: v.copy() for k, v in vars(self.env.unwrapped).items() if isinstance(v, np.ndarray)}
        rng = json.dumps(self.env.unwrapped.np_random.bit_generator.state).encode()
        return {**arrays, "rng": np.frombuffer(rng, np.uint8)}

    def restore(self, state: dict[str, Array]) -> Array | None:
        self.env.reset(seed=0)
        raw = self.env.unwrapped
        for name, array in state.items():
            if name != "rng":
                setattr(raw, name, array.copy())
        raw.np_random.bit_generator.state = json.loads(state["rng"].tobytes())
        return self._column(raw.state.T)

    def close(self) -> None:
        self.env.close()


def native(game: Game, count: int) -> Native | None:
    """The vector form that Gymnasium has registered for the game, if it is the same game and resets as we expect."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator
    from gymnasium.vector import AutoresetMode

    assert game.env is not None
    kwargs = game.env_kwargs or {}
    if not isinstance(game.observation, Box) or game.env.startswith("phys2d/"):
        return None
    name = game.env.rpartition(":")[2]
    register(game.env)
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv:  # `make` says what to do
        return None
    if spec.vector_entry_point is None:
        return None
    if name.startswith("ALE/"):
        from sparring.games.atari import Ataris

        return Native(game, Ataris(name, count, AtariSettings.parse(kwargs)))
    entry = spec.vector_entry_point
    known, _ = accepted(load_env_creator(entry) if isinstance(entry, str) else entry)
    if not kwargs.keys() <= set(known):  # its vector form cannot be set so
        return None
    with own_fault(game.env, "its vector form's constructor"):
        env = gymnasium.make_vec(name, count, vectorization_mode="vector_entry_point", **kwargs)
    same = space_of(env.single_observation_space)
    if (
        not isinstance(same, Box)
        or same.element != game.observation.element
        or space_of(env.single_action_space) != game.action
        or env.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP
    ):
        env.close()
        return None
    return Native(game, env)


def clips_rewards(game: Game) -> bool:
    """Whether one learns from the sign of its rewards; its returns are the game's own all the same."""
    if game.env is None or not game.env.startswith("ALE/"):
        return False
    return AtariSettings.parse(game.env_kwargs or {}).reward_clipping


def has_mask(info: Any) -> bool:
    return isinstance(info, Mapping) and MASK in info


def scalars(info: Any) -> dict[str, float]:
    """The finite numbers and truth values of an `info`, by name."""
    found: dict[str, float] = {}
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if not isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
            continue
        number = math.inf if isinstance(value, int) and value.bit_length() > 1000 else float(value)
        if math.isfinite(number) and isinstance(name, str) and NAME.fullmatch(name):
            found[name] = number
    return found


def require_form(game: Game, obs: Any) -> None:
    """NumPy would spread one number over a whole observation without a word. Asked at an episode's first two."""
    space = game.observation
    fields = space.fields if isinstance(space, Dict) else {"": space}
    for name, part in fields.items():
        value = obs[name] if name else obs
        if isinstance(part, Box) and np.shape(value) != part.shape:
            where = f" in {name!r}" if name else ""
            raise InputError(
                f"{game.name}: an observation of shape {np.shape(value)}{where}, its space says {part.shape}"
            )


def put(space: Space, column: Array, i: int, obs: Any) -> None:
    """One observation as the game gives it into its place of a column."""
    if isinstance(space, Dict):
        for name, part in space.fields.items():
            put(part, column[name], i, obs[name])
    elif isinstance(space, Box | Discrete):
        column[i] = obs
    else:
        column[i] = np.ravel(obs)  # MultiBinary has a shape, our MultiDiscrete is flat
