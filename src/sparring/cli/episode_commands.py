"""`sparring episodes|episode`: what was played, episode by episode."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sparring.cli.options import DEFAULT_SERVER, JsonOption, ServerOption, examples, get, show_whole
from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer()
LOOK = 100_000  # episodes that are looked at for a list
SHOWN = 8  # numbers of an observation


@app.command(epilog=examples("sparring episodes my-game", "sparring episodes my-game --people --since 7d --limit 100"))
def episodes(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    player: Annotated[str | None, typer.Option(help="Only this player's.")] = None,
    model: Annotated[str | None, typer.Option(help="Only those that this model ended.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Only those that this version ended.")] = None,
    people: Annotated[bool, typer.Option("--people", help="Only people's.")] = False,
    bots: Annotated[bool, typer.Option("--bots", help="Only bots'.")] = False,
    since: Annotated[str | None, typer.Option(help="Only newer ones: 7d, 12h, or a date as 2026-11-18.")] = None,
    before: Annotated[int | None, typer.Option(min=1, help="Only those older than this id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, the newest first.")] = 20,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List finished episodes, the newest first. The return is the total reward of an episode."""
    from urllib.parse import urlencode

    from sparring.api import EpisodeInfo, EpisodeList
    from sparring.data.selection import Selection
    from sparring.terminal import ago, number, table

    chosen = Selection.of(player, model, version, since, people, bots)
    asked: dict[str, Any] = {"player": player, "model": model, "version": version}
    asked["people"] = None if chosen.people is None else str(chosen.people).lower()
    asked["since"] = None if chosen.since is None else int(min(max(chosen.since, 0.0), 1e11))
    found: list[EpisodeInfo] = []
    looked = 0
    while True:
        page = {**asked, "before": before, "limit": min(limit - len(found), 1000)}
        query = urlencode({name: value for name, value in page.items() if value is not None})
        answer = get(server, EpisodeList, "games", game, "episodes", query=f"?{query}")
        found, looked, before = [*found, *answer.episodes], looked + answer.looked_at, answer.before
        if before is None or len(found) >= limit or looked >= LOOK:
            break
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    cells = [(str(e.id), e.player, who(e.model, e.version), str(e.steps), number(e.ret), ago(e.ended)) for e in found]
    columns = (">id", "player", "who acted", ">steps", ">return", ">when")
    show_whole(table(f"episodes of {game}", columns, cells, "none that is finished and complete", whole=True))
    if before is not None:
        _note(f"older ones: --before {before}" + (f" (looked at {looked})" if len(found) < limit else ""))


@app.command(epilog=examples("sparring episode my-game 18234", "sparring episode my-game/18234 --out replay.mp4"))
def episode(
    game: Annotated[str, typer.Argument(metavar="GAME[/ID]", help="A game, or an episode as GAME/ID.")],
    number: Annotated[
        int | None, typer.Argument(metavar="[ID]", min=1, help="As `sparring episodes` lists it.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="The first step to show.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="How many steps to show.")] = 100,
    out: Annotated[Path | None, typer.Option(help="Draw all of it into this .mp4 or .gif file.")] = None,
    env: Annotated[str | None, typer.Option(help="With --out: the simulator, as module:Id.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show the steps of an episode, or draw them."""
    from sparring.terminal import number as short
    from sparring.terminal import table

    game, number = _identify(server, game, number)
    if out is not None:
        _draw(server, game, number, out, env)
        return
    episode = read(server, game, number, first, limit)
    if as_json:
        print(msgspec.json.encode(episode).decode())
        return
    cells = [
        (str(r.step), who(r.model, r.version), shorten(r.obs), shorten(r.action), f"{r.reward:g}", _end(r))
        for r in episode.rows
    ]
    title = f"episode {episode.id} of {game}: {episode.player}, {episode.steps} steps, return {short(episode.ret)}"
    columns = (">step", "who acted", "observation", "action", ">reward", "")
    show_whole(table(title, columns, cells, "no such steps", whole=True))
    if episode.next is not None:
        _note(f"{episode.steps - episode.next} more steps: --first {episode.next}")


def _identify(server: str, game: str, number: int | None) -> tuple[str, int]:
    from sparring.api import GameInfo

    name, slash, last = game.partition("/")
    if slash and number is None and last.isdecimal():
        return name, int(last)
    if slash:
        raise InputError(f"{game!r}: name an episode as GAME/ID or GAME ID, with an id of `sparring episodes GAME`")
    if number is not None:
        return game, number
    names = [g.name for g in get(server, list[GameInfo], "games")]
    if game.isdecimal() and game not in names and len(names) == 1:
        return names[0], int(game)
    if game in names:
        raise InputError(f"which episode of {game}? `sparring episodes {game}` lists them")
    raise InputError(f"which game is {game!r} of? Say `sparring episode GAME {game}`; here are {', '.join(names[:20])}")


def read(server: str, game: str, number: int, first: int, limit: int) -> Any:
    """Some steps, in as many answers as it takes."""
    from sparring.api import EpisodeRows

    rows: list[Any] = []
    while True:
        query = f"?first={first}&limit={min(limit - len(rows), 1000)}"
        page = get(server, EpisodeRows, "games", game, "episodes", str(number), query=query)
        rows += page.rows
        if page.next is None or len(rows) >= limit:
            return msgspec.structs.replace(page, rows=rows)
        first = page.next


def _draw(server: str, game: str, number: int, out: Path, env: str | None) -> None:
    from sparring.games import Game
    from sparring.games.spec import column
    from sparring.runs.film import draw

    spec = get(server, Game, "games", game)
    if env is None and spec.env is not None and ":" in spec.env:  # a server shall not choose what is imported here
        raise InputError(f"the simulator of {game} is {spec.env}, code of your own: run it with --env {spec.env}")
    rows = read(server, game, number, 0, 1 << 60).rows
    obs = column(spec.observation, [*(row.obs for row in rows), rows[-1].next_obs])
    how = draw(spec, obs, column(spec.action, [row.action for row in rows]), out, env)
    Console().print(f"{out}: {len(obs)} pictures, {how}", highlight=False, markup=False, soft_wrap=True)


def who(model: str | None, version: int | None) -> str:
    return "a person" if model is None else f"{model} v{version}"


def shorten(value: Any) -> str:
    """A few numbers of an observation or an action."""
    if isinstance(value, dict):
        return " ".join(f"{name}={shorten(part)}" for name, part in value.items())
    if not isinstance(value, list):
        return str(int(value)) if isinstance(value, bool | int) else f"{value:.4g}"
    shape: list[int] = []
    inner: Any = value
    flat: list[Any] = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    for _ in shape[1:]:
        flat = [part for row in flat for part in row]
    numbers = ", ".join(shorten(part) for part in flat[:SHOWN]) + (", …" if len(flat) > SHOWN else "")
    return f"[{numbers}]" + (f" ({'×'.join(map(str, shape))})" if len(shape) > 1 or len(flat) > SHOWN else "")


def _end(row: Any) -> str:
    return "terminated" if row.terminated else "truncated" if row.truncated else ""


def _note(text: str) -> None:
    Console(stderr=True).print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
