"""Finished episodes, chosen and as rows: for the API and the command line. A question looks at a bounded part of a
store, and says where it stopped."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sparring.api import EpisodeInfo, EpisodeList, EpisodeRow, EpisodeRows
from sparring.data.selection import Selection
from sparring.data.steps import of_fragments
from sparring.experience import Fragment
from sparring.games import Game
from sparring.games.spec import Array, Dict, Space
from sparring.store.protocol import Episode, Store

__all__ = ["find_episodes", "read_episode"]

LOOK = 10_000  # episodes that one question looks at
PAGES = 20  # and pages of the store
BYTES = 1 << 20  # of observations in one answer, if one has no more


def find_episodes(store: Store, game: str, selection: Selection, before: int | None, limit: int) -> EpisodeList:
    """Those of a selection, the newest first."""
    found: list[EpisodeInfo] = []
    looked = 0
    for _ in range(PAGES):
        page = store.newest_episodes(game, before, min(max(limit, 1000), LOOK - looked))
        for episode in page.episodes:
            if selection.since is not None and episode.ended < selection.since:
                return EpisodeList(found, None, looked)  # what is older arrived before
            looked += 1
            if selection.names(episode):
                found.append(info(episode))
                if len(found) == limit:
                    more = page.before is not None or episode is not page.episodes[-1]
                    return EpisodeList(found, episode.cursor if more else None, looked)
        before = page.before
        if before is None or looked >= LOOK:
            break
    return EpisodeList(found, before, looked)


def read_episode(store: Store, game: Game, cursor: int, first: int, limit: int) -> EpisodeRows | None:
    """The steps of an episode from `first` on: at most `limit`, and fewer when they are large."""
    limit = max(min(limit, BYTES // game.observation.element.itemsize), 1)
    found = store.episode(game.name, cursor, first, first + limit)
    if found is None:
        return None
    episode, fragments = found
    rows = _rows(game, fragments, first, limit) if fragments else []
    last = rows[-1].step + 1 if rows else episode.steps
    return EpisodeRows(**msgspec.structs.asdict(info(episode)), rows=rows, next=last if last < episode.steps else None)


def info(e: Episode) -> EpisodeInfo:
    return EpisodeInfo(
        id=e.cursor,
        player=e.player,
        episode=e.episode,
        model=e.model,
        version=e.version,
        steps=e.steps,
        ret=e.ret,
        ended=e.ended,
    )


def _rows(game: Game, fragments: Sequence[Fragment], first: int, limit: int) -> list[EpisodeRow]:
    steps = of_fragments(game, fragments)
    wanted = np.flatnonzero((steps.step >= first) & (steps.step < first + limit))
    if not len(wanted):
        return []
    some = steps.slice(int(wanted[0]), int(wanted[-1]) + 1)
    over = some.terminated | some.truncated
    obs, action = _plain(game.observation, some.obs), _plain(game.action, some.action)
    after = _plain(game.observation, some.next_obs[over])
    return [
        EpisodeRow(
            step=int(some.step[i]),
            obs=obs[i],
            action=action[i],
            reward=float(some.reward[i]),
            terminated=bool(some.terminated[i]),
            truncated=bool(some.truncated[i]),
            next_obs=after[int(over[:i].sum())] if over[i] else None,
            log_prob=None if np.isnan(some.log_prob[i]) else float(some.log_prob[i]),
            model=some.model[i],
            version=None if some.version[i] < 0 else int(some.version[i]),
        )
        for i in range(len(some))
    ]


def _plain(space: Space, column: Array) -> list[Any]:
    """As JSON has it: what `column` of games.spec reads."""
    if isinstance(space, Dict):
        parts = {name: column[name].tolist() for name in sorted(space.fields)}
        return [{name: values[i] for name, values in parts.items()} for i in range(len(column))]
    return list(column.tolist())
