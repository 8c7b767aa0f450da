"""`sparring ab`: several models of a game, each for a share of its players."""

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sparring.cli.options import (
    DEFAULT_SERVER,
    ByOption,
    JsonOption,
    PlatformGame,
    ReasonOption,
    ServerOption,
    change,
    examples,
    get,
    show_whole,
)
from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer(help="A/B tests: several models of a game, each for a share of its players.")
COLUMNS = ("model", ">share", "play of", ">episodes", ">players", ">mean return", "95 % interval", "difference")


@app.callback(invoke_without_command=True)
def _all(context: typer.Context, server: ServerOption = DEFAULT_SERVER) -> None:
    if context.invoked_subcommand is not None:
        return
    from sparring.api import GameInfo
    from sparring.registry.ab import AbTests

    running = 0
    for game in get(server, list[GameInfo], "games"):
        if get(server, AbTests, "games", game.name, "ab").running is not None:
            _show(server, game.name)
            running += 1
    if not running:
        _say("no A/B test runs: `sparring ab start GAME MODEL=SHARE MODEL=SHARE` starts one")


@app.command(
    epilog=examples(
        "sparring ab start my-game bot=0.5 careful=0.5",
        "sparring ab start my-game bot=0.8 careful=0.1 wild=0.1 --reason 'do players like another style?'",
    )
)
def start(
    game: PlatformGame,
    shares: Annotated[
        list[str], typer.Argument(metavar="MODEL=SHARE…", help="Two models or more; the shares add up to 1.")
    ],
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Give each player one of several models, at its `stable` version, for as long as the test runs."""
    from sparring.registry.ab import AbTest

    body = {"shares": _shares(shares), "reason": reason, "by": by}
    test = change(server, "POST", "games", game, "ab", body=body).decode(AbTest)
    parts = ", ".join(f"{share:.3g} {model}" for model, share in test.shares.items())
    _say(f"{game}: an A/B test runs: {parts}. `sparring ab show {game}` tells how it stands")


@app.command(epilog=examples("sparring ab show my-game", "sparring ab show my-game --json"))
def show(game: PlatformGame, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show how a game's A/B test stands, and those that have ended."""
    _show(server, game, as_json, ended=True)


@app.command(epilog=examples("sparring ab stop my-game", "sparring ab stop my-game --keep careful"))
def stop(
    game: PlatformGame,
    keep: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Players get this one: it becomes the next version of `bot`.")
    ] = None,
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """End a game's A/B test: players get `bot` again, or with --keep the model that it names."""
    from urllib.parse import urlencode

    from sparring.registry.ab import AbTest

    asked = {"reason": reason, "by": by} | ({"keep": keep} if keep is not None else {})
    test = change(server, "DELETE", "games", game, "ab", query=f"?{urlencode(asked)}").decode(AbTest)
    if test.results is not None:
        _table(game, test, test.results)
    after = "players get bot" if test.kept in (None, "bot") else f"players get {test.kept}, as the next version of bot"
    _say(f"{game}: the A/B test is over: {after}")


def _shares(given: list[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in given:
        model, sign, share = text.partition("=")
        try:
            value = float(share)
        except ValueError:
            sign = ""
        if not sign or not model:
            raise InputError(f"{text!r} is no share: write MODEL=SHARE, like bot=0.5 careful=0.5")
        if model in shares:
            raise InputError(f"{model!r} is named twice: give each model one share")
        shares[model] = value
    return shares


def _show(server: str, game: str, as_json: bool = False, ended: bool = False) -> None:
    from sparring.registry.ab import AbResults, AbTests
    from sparring.terminal import ago, table

    tests = get(server, AbTests, "games", game, "ab")
    found = get(server, AbResults, "games", game, "ab", "results") if tests.running else None
    if as_json:
        print(msgspec.json.encode({"running": tests.running, "results": found, "ended": tests.ended}).decode())
        return
    if tests.running is not None:
        _table(game, tests.running, found)
    else:
        _say(f"{game}: no A/B test runs: `sparring ab start {game} MODEL=SHARE MODEL=SHARE` starts one")
    if not ended or not tests.ended:
        return
    rows = [
        (
            ago(t.ended),
            ", ".join(f"{model} {share:.3g}" for model, share in t.shares.items()),
            t.kept or "–",
            t.results.verdict if t.results else "–",
            t.reason,
        )
        for t in tests.ended
    ]
    show_whole(table("\nended", ("when", "shares", "kept", "results", "reason"), rows, whole=True))


def _table(game: str, test: Any, results: Any) -> None:
    from sparring.terminal import ago, number, table

    rows = []
    for arm in results.arms:
        for whose, r in (("bots", arm.bots), ("people", arm.people)):
            rows.append(
                (
                    arm.model if whose == "bots" else "",
                    f"{arm.share:.3g}" if whose == "bots" else "",
                    whose,
                    str(r.episodes),
                    "–" if r.players is None else str(r.players),
                    number(r.mean),
                    _interval(r.low, r.high),
                    ""
                    if r.difference is None
                    else f"{r.difference:+.4g} ({_interval(r.difference_low, r.difference_high)})",
                )
            )
    because = f": {test.reason}" if test.reason else ""
    show_whole(table(f"{game}: A/B test since {ago(test.started)}{because}", COLUMNS, rows, whole=True))
    why = "of another model than their player's left out: begun before, or asked for by name"
    left = f" ({results.left_out} episode{'' if results.left_out == 1 else 's'} {why})"
    _say(results.verdict + (left if results.left_out else ""))


def _difference(r: Any) -> str:
    if r.difference is None:
        return ""
    return f"{r.difference:+.4g} ({_interval(r.difference_low, r.difference_high)})"


def _interval(low: float | None, high: float | None) -> str:
    return "too few yet" if low is None or high is None else f"{low:.4g} … {high:.4g}"


def _say(text: str) -> None:
    from sparring.terminal import plain

    Console().print(plain(text), soft_wrap=True)
