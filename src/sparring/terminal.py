"""What people see in the terminal: tables, a curve in braille, and the live view of one game."""

import math
import time
from collections.abc import Iterator, Sequence

from rich.columns import Columns
from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sparring.api import PlayerRow, Snapshot

__all__ = ["ago", "curve", "number", "plain", "returns", "table", "view"]


def plain(text: str, style: str = "") -> Text:
    """Text of others: no markup in it, and no escape sequences that would move the cursor or rename the window."""
    return Text("".join(c if c.isprintable() or c == "\n" else "�" for c in text), style)


def number(value: float | None, unit: str = "") -> str:
    """12345 → 12.3 k; none → –."""
    if value is None:
        return "–"
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g} {prefix}{unit}"
    digits = f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def ago(then: float | None, now: float | None = None) -> str:
    if then is None:
        return "–"
    seconds = max((time.time() if now is None else now) - then, 0)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str = "nothing yet",
    *,
    whole: bool = False,
) -> RenderableType:
    """Columns whose name starts with '>' are right-aligned. `whole`: a text that is too long goes on in
    the next line."""
    if not rows:
        return plain(f"{title}: {empty}", "dim")
    grid = Table(box=None, pad_edge=False, header_style="bold")
    widest = max(len(row[0]) for row in rows)  # what the others are about is never cut: other commands ask for it
    for i, name in enumerate(columns):
        least = min(widest, 60) if i == 0 and not whole else None
        number = name.startswith(">")
        justify: JustifyMethod = "right" if number else "left"
        overflow: OverflowMethod = "fold" if whole else "ellipsis"
        grid.add_column(
            name.lstrip(">"), justify=justify, no_wrap=number or not whole, overflow=overflow, min_width=least
        )
    for row in rows:
        grid.add_row(*(plain(cell) for cell in row))
    return Group(plain(title, "italic"), grid)  # Table's own title would be squeezed to the width of its columns


def curve(values: Sequence[float], width: int = 60, height: int = 8, top: float | None = None) -> str:
    """A line plot in braille: two by four dots a character, the y axis at its left."""
    if not values:
        return ""
    points = [values[int(i * len(values) / (2 * width))] for i in range(2 * width)]
    low, high = min(min(points), 0.0), max(max(points), -math.inf if top is None else top)
    span = (high - low) or 1.0
    rows = [round((v - low) / span * (4 * height - 1)) for v in points]
    cells = [[0] * width for _ in range(height)]
    before = rows[0]
    for x, y in enumerate(rows):
        for dot in range(min(before, y), max(before, y) + 1):  # the rise between neighbours, so that the line holds
            row, part = divmod(4 * height - 1 - dot, 4)
            cells[row][x // 2] |= ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))[part][x % 2]
        before = y
    labels = {0: number(high), height - 1: number(low)}
    margin = max(7, *(len(label) for label in labels.values()))
    return "\n".join(
        f"{labels.get(i, ''):>{margin}} ┤{''.join(chr(0x2800 + cell) for cell in row)}" for i, row in enumerate(cells)
    )


def _even(points: Sequence[tuple[float, float]], count: int = 200) -> list[float]:
    """The same curve at even times: as many points a second at its end, where episodes are long, as at its start."""
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return [value for _, value in points]
    first, last, at, values = points[0][0], points[-1][0], 0, []
    for i in range(count):
        moment = first + (last - first) * i / (count - 1)
        while at + 1 < len(points) and points[at + 1][0] <= moment:
            at += 1
        values.append(points[at][1])
    return values


def _figures(s: Snapshot) -> Table:
    figures = Table.grid(padding=(0, 2))
    cells = [
        ("people's return", number(s.people.return_mean)),
        ("bots' return", number(s.bots.return_mean)),
        ("players", str(s.active_players)),
        ("steps/s", number(s.steps_per_s)),
        ("steps", number(s.stats.steps)),
        ("version", "–" if s.latest is None else f"v{s.latest}"),
        ("updates", number(s.trainer.updates if s.trainer else 0)),
    ]
    figures.add_row(*(Text(name, style="dim") for name, _ in cells))
    figures.add_row(*(Text(value, style="bold") for _, value in cells))
    return figures


def _curves(s: Snapshot, target: float | None, width: int) -> Iterator[RenderableType]:
    """One for people and one for bots, where both played."""
    apart = (("people's ", s.people.curve), ("bots' ", s.bots.curve))
    played = [(who, points) for who, points in apart if points]
    if not played and s.curve:  # a server that does not tell them apart yet
        played = [("", s.curve)]
    if not played:
        yield Text("no finished episode yet", style="cyan")
    for who, points in played:
        goal = "" if target is None else f" (goal {target:g})"
        means = _even([(p.time, p.mean) for p in points])
        yield Text(f"{who}return by time{goal}", style="dim")
        yield Text(curve(means, width, 9 if len(played) == 1 else 5, target), style="cyan")


def _player(p: PlayerRow) -> tuple[str, ...]:
    return p.player, p.kind, number(p.steps), returns(p), ago(p.last_seen)


def returns(p: PlayerRow) -> str:
    """A player's mean return; of one who also lets a bot play, the person's and the bot's."""
    if p.kind != "both":
        return number(p.all.return_mean)
    return f"{number(p.person.return_mean)} / {number(p.bot.return_mean)}"


def _trainer(s: Snapshot) -> Iterator[str]:
    t = s.trainer
    if t is None or s.paused:
        yield "trainer: paused" if s.paused else "trainer: starting"
        return
    state = f"trainer: {t.algorithm}, {t.state}"
    if t.updates:
        state += f", {number(t.updates_per_s)} updates/s"
    elif t.needed:
        state += f", {min(t.gathered, t.needed):,} of {t.needed:,} steps needed to begin"
    if t.exploration is not None and t.updates:
        state += f", exploring {t.exploration:.0%}"
    yield state + (f"; {t.lag} fragments not learned from yet" if t.lag else "")
    if t.use:
        yield f"it {t.use}"
    if t.candidate is not None:
        yield f"candidate: v{t.candidate}" + (f", {t.evidence}" if t.evidence else "")
    if t.decision:
        yield f"last decision: {t.decision}"


def view(snapshot: Snapshot | None, url: str, target: float | None = None, width: int = 80) -> RenderableType:
    """The live view: figures, return curve, versions and players of one game."""
    if snapshot is None:
        return Panel(Text("waiting for the first steps…"), title="sparring", subtitle=plain(url))
    s = snapshot
    versions = table(
        "versions",
        ("version", ">steps seen", ">evaluation", ">episodes", ">return in play"),
        [
            (f"v{v.version}", number(v.steps), number(v.evaluation), str(v.played), number(v.return_mean))
            for v in reversed(s.versions[-6:])
        ],
    )
    columns = ("name", "plays as", ">steps", ">return", ">seen")
    players = table("players", columns, [_player(p) for p in s.players[:6]])
    body = Group(
        _figures(s),
        Text(),
        *_curves(s, target, max(20, min(width - 14, 100))),
        Text(),
        Columns([versions, players], padding=(0, 4)),
        *(plain(line, "dim") for line in _trainer(s)),
    )
    title, subtitle = plain(f"sparring · {s.game}"), plain(f"dashboard {url}")
    return Panel(body, title=title, subtitle=subtitle, title_align="left", subtitle_align="left")
