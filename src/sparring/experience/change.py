"""From one form of a game to the next: what changed, in words, and how old steps become steps of the new form."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.experience.fragment import Fragment
from sparring.games.spec import Array, Box, Dict, Discrete, Game, MultiDiscrete, Space, column

__all__ = ["Change", "Unmapped", "sources"]

OBSERVATION, ACTION = "observation", "action"


class Unmapped(ValueError):
    """Steps that the new form has no place for; why, for people."""


class Change:
    """From `old` to `new`.

    :param defaults: values of fields that the old form does not have, by their names. An observation that is no dict,
        and the action, have the names `observation` and `action`. Others are 0, or the nearest that the space allows.
    :raises InputError: a default is of no added field, or does not fit it.
    """

    def __init__(self, old: Game, new: Game, defaults: Mapping[str, Any] = {}) -> None:
        self.old, self.new = old, new
        self._defaults = self._check(defaults)
        self.problem = _kinds(OBSERVATION, old.observation, new.observation) or _kinds(ACTION, old.action, new.action)

    def words(self) -> list[str]:
        """What changed, for people."""
        old, new = self.old, self.new
        found = self._of_fields() if isinstance(old.observation, Dict) and isinstance(new.observation, Dict) else []
        if not found and old.observation != new.observation:
            found = _different("the observation", old.observation, new.observation)
        found += _different("the action", old.action, new.action)
        if old.players != new.players:
            found.append(f"{new.players} play at once, it was {old.players}")
        return found + ([f"old play cannot be used: {self.problem}"] if self.problem else [])

    def fragment(self, f: Fragment) -> Fragment:
        """:raises Unmapped: the new form has no place for it."""
        if self.problem is not None:
            raise Unmapped(self.problem)
        columns = f.columns(self.old)
        obs = self._carry(OBSERVATION, self.old.observation, self.new.observation, columns.obs)
        action = self._carry(ACTION, self.old.action, self.new.action, columns.action)
        same = self.old.action == self.new.action
        return msgspec.structs.replace(
            f,
            game=self.new.name,
            schema=self.new.schema,
            obs=obs.tobytes(),
            action=action.tobytes(),
            log_prob=f.log_prob if same else None,  # of another set of actions it says nothing
        )

    def _carry(self, part: str, old: Space, new: Space, values: Array) -> Array:
        if old == new:
            return values
        if isinstance(old, Dict) and isinstance(new, Dict):
            out = np.empty(len(values), new.element)
            for name, space in new.fields.items():
                had = old.fields.get(name)
                out[name] = self._one(name, had, space, None if had is None else values[name], len(values))
        else:
            out = self._one(part, old, new, values, len(values))
        return out

    def _one(self, name: str, old: Space | None, new: Space, values: Array | None, rows: int) -> Array:
        out = np.repeat(self._default(name, new), rows, 0)
        if old is not None and values is not None and type(old) is type(new):
            shape = old.element.shape, new.element.shape
            if len(shape[0]) == len(shape[1]):
                both = (slice(None), *(slice(min(a, b)) for a, b in zip(*shape, strict=True)))
                with np.errstate(invalid="ignore", over="ignore"):
                    out[both] = values[both].astype(out.dtype)
        if (why := new.problem(out)) is not None:
            raise Unmapped(f"{name} {why}, which it may not be any more")
        return out

    def _default(self, name: str, space: Space) -> Array:
        if name in self._defaults:
            return self._defaults[name]
        out = np.zeros((1, *space.element.shape), space.element.base)
        if isinstance(space, Discrete):
            out[...] = min(max(0, space.start), space.start + space.n - 1)
        elif isinstance(space, Box):
            low, high = space.bounds
            out = out if low is None else np.maximum(out, low.astype(out.dtype))
            out = out if high is None else np.minimum(out, high.astype(out.dtype))
        return out

    def _check(self, defaults: Mapping[str, Any]) -> dict[str, Array]:
        new = self.new.observation
        spaces: dict[str, Space] = dict(new.fields) if isinstance(new, Dict) else {OBSERVATION: new}
        spaces[ACTION] = self.new.action
        found = {}
        for name, value in defaults.items():
            if name not in spaces:
                raise InputError(f"default {name!r} is of no field: there are {', '.join(spaces)}")
            try:
                made = column(spaces[name], [value])
            except (ValueError, TypeError, OverflowError) as error:
                raise InputError(f"default {name}: {error}") from error
            if (why := spaces[name].problem(made)) is not None:
                raise InputError(f"default {name} {why}")
            found[name] = made
        return found

    def _of_fields(self) -> list[str]:
        old, new = self.old.observation, self.new.observation
        assert isinstance(old, Dict)
        assert isinstance(new, Dict)
        added = [name for name in sorted(new.fields) if name not in old.fields]
        words = [f"you added `{n}`: in old play it is {self._default(n, new.fields[n]).tolist()[0]}" for n in added]
        words += [f"you dropped `{name}`" for name in sorted(old.fields) if name not in new.fields]
        for name in sorted(old.fields.keys() & new.fields.keys()):
            words += _different(f"`{name}`", old.fields[name], new.fields[name])
        return words


def sources(old: Space, new: Space) -> Array:
    """For each number that a network sees or says of the new space, the place of the same one in the old; -1: none."""
    if isinstance(old, Dict) and isinstance(new, Dict):
        at, begin = 0, {}
        for name in sorted(old.fields):
            begin[name] = at
            at += len(sources(old.fields[name], old.fields[name]))
        parts = []
        for name in sorted(new.fields):
            had = old.fields.get(name)
            inner = _none(new.fields[name]) if had is None else sources(had, new.fields[name])
            parts.append(np.where(inner < 0, -1, inner + begin.get(name, 0)))
        return np.concatenate(parts)
    if isinstance(old, Discrete) and isinstance(new, Discrete):
        values = np.arange(new.start, new.start + new.n) - old.start
        return np.where((values >= 0) & (values < old.n), values, -1)
    if isinstance(old, MultiDiscrete) and isinstance(new, MultiDiscrete):
        starts = np.cumsum([0, *old.nvec])
        pairs = [(old.nvec[i] if i < len(old.nvec) else 0, n, i) for i, n in enumerate(new.nvec)]
        return np.concatenate(
            [np.where(np.arange(n) < had, np.arange(n) + starts[min(i, len(old.nvec))], -1) for had, n, i in pairs]
        )
    if isinstance(old, Box) and isinstance(new, Box) and len(old.shape) == len(new.shape):
        out = np.full(new.shape, -1)
        both = tuple(slice(min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))
        out[both] = np.arange(int(np.prod(old.shape))).reshape(old.shape)[both]
        return out.reshape(-1)
    return _none(new)


def _none(space: Space) -> Array:
    return np.full(len(sources(space, space)), -1)


def _kinds(part: str, old: Space, new: Space) -> str | None:
    if type(old) is type(new) and (isinstance(old, Dict) or len(old.element.shape) == len(new.element.shape)):
        return None
    return f"the {part} is {_kind(new)}, it was {_kind(old)}"


def _kind(space: Space) -> str:
    if isinstance(space, Box):
        return f"a box of {len(space.shape)} dimensions"
    return {"Dict": "a dict", "Discrete": "discrete", "MultiDiscrete": "multi_discrete"}[type(space).__name__]


def _different(what: str, old: Space, new: Space) -> list[str]:
    if old == new:
        return []
    if isinstance(old, Discrete) and isinstance(new, Discrete):
        if old.start == new.start:
            return [f"{what} has {new.n} values, it had {old.n}"]
        return [f"{what} is {new.start}..{new.start + new.n - 1}, it was {old.start}..{old.start + old.n - 1}"]
    if isinstance(old, MultiDiscrete) and isinstance(new, MultiDiscrete):
        return [f"{what} has the choices {list(new.nvec)}, it had {list(old.nvec)}"]
    if isinstance(old, Box) and isinstance(new, Box):
        words = []
        if old.shape != new.shape:
            words.append(f"{what} has the shape {list(new.shape)}, it had {list(old.shape)}")
        if old.dtype != new.dtype:
            words.append(f"{what} is {new.dtype}, it was {old.dtype}")
        if (old.low, old.high) != (new.low, new.high):
            words.append(f"{what} is {_bounds(new)}, it was {_bounds(old)}")
        return words
    return [f"{what} is {_kind(new)}, it was {_kind(old)}"]


def _bounds(space: Box) -> str:
    if space.low is None and space.high is None:
        return "without bounds"
    return f"from {'−∞' if space.low is None else space.low!r:.60} to {'∞' if space.high is None else space.high!r:.60}"
