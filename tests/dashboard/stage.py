"""A platform to look at: a real store, a real registry, a real gateway, and play to fill them with."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import urllib3
from playwright.sync_api import Page

from sparring.api import Snapshot, TrainerStatus
from sparring.experience import Columns, Fragment, new_id, pack, wire
from sparring.games import Box, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.manifest import DataSpan, Manifest
from sparring.registry.registry import Registry
from sparring.store.sqlite import SqliteStore

__all__ = ["CARTPOLE", "OUTSIDE", "WIDTHS_OF_TEXT", "Platform", "episode", "set_text", "snapshot", "upload"]

CARTPOLE = Game("CartPole-v1", observation=Box((4,)), action=Discrete(2), env="CartPole-v1")

OUTSIDE = """() => {
  const right = (one) => one.getBoundingClientRect().right;
  const window = document.documentElement.clientWidth;
  const hanging = [...document.querySelectorAll("body *")].filter((one) => right(one) > window + 0.5);
  const parts = [...document.querySelectorAll("table, .figures > div, .setting, .life > div, .bar, .served")];
  const broad = parts.filter((one) => one.offsetParent && right(one) > right(one.parentElement) + 0.5);
  const found = [...hanging, ...broad].filter((one) => !one.matches(".who"));
  return found.map((one) => one.tagName + "." + one.className + "#" + one.id);
}"""  # names of players are cut off, with dots
WIDTHS_OF_TEXT = [100, 130]  # per cent of DejaVu's, which is a sixth wider than the fonts of most systems
FONTS = """([locals, percent]) => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(Object.entries(locals).map(([name, local]) =>
    `@font-face { font-family: "${name} ${percent}"; src: local("${local}"); size-adjust: ${percent}%; }
    :root { --${name}: "${name} ${percent}" !important; }`).join(" "));
  document.adoptedStyleSheets = [sheet];
  const faces = Object.keys(locals).map((name) => document.fonts.load(`16px "${name} ${percent}"`));
  return Promise.all(faces).then((faces) => faces.flat().length);
}"""


def set_text(page: Page, percent: int) -> None:
    """All text in DejaVu, which may be the only family of a system, as wide as `percent` of it."""
    names = {"sans": "DejaVu Sans", "serif": "DejaVu Serif", "mono": "DejaVu Sans Mono"}
    assert page.evaluate(FONTS, [names, percent]) == len(names), "not all of DejaVu: package fonts-dejavu-core"


def episode(
    length: int, player: str = "ada", version: int | None = None, game: Game = CARTPOLE, reward: float = 1.0
) -> Fragment:
    """A whole episode in one fragment; its return is length × reward."""
    columns = Columns(
        obs=np.zeros(length + 1, game.observation.element),
        action=np.zeros(length, game.action.element),
        reward=np.full(length, reward, np.float32),
    )
    return pack(
        game,
        columns,
        id=new_id(),
        player=player,
        episode=new_id(),
        start=0,
        time=time.time(),
        terminated=True,
        model=None if version is None else "bot",
        version=version,
    )


@dataclass
class Platform:
    store: SqliteStore
    registry: Registry
    trainer: Path
    make_policy: Callable[..., Policy]

    def serve(self, port: int = 0) -> AbstractContextManager[str]:
        return background(create_app(self.store, self.registry, self.trainer), port=port)

    def publish(self, evaluation: float, steps: int, game: Game = CARTPOLE, created: float | None = None) -> Manifest:
        return self.registry.publish(
            self.make_policy(game, (Dense(8),), QValues()),
            algorithm="dqn",
            metrics={"evaluation/return_mean": evaluation},
            data=DataSpan(steps=steps),
            created=created,
        )

    def say(self, status: TrainerStatus) -> None:
        """What the trainer says of itself."""
        folder = self.trainer / status.game
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "status.draft"
        draft.write_bytes(msgspec.json.encode(status))
        draft.rename(folder / "status.json")


def upload(url: str, *fragments: Fragment) -> None:
    answer = urllib3.request(
        "POST",
        f"{url}/v1/games/{fragments[0].game}/fragments",
        body=wire.encode(list(fragments)),
        headers={"content-type": "application/msgpack"},
    )
    assert answer.status == 200, answer.data


def snapshot(url: str, game: str = CARTPOLE.name) -> Snapshot:
    return msgspec.json.decode(urllib3.request("GET", f"{url}/v1/games/{game}/stats").data, type=Snapshot)
