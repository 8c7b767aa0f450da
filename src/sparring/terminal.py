"""What people see in the terminal: tables, a curve in braille, and the live view of one game."""

import math
import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sparring.api import Snapshot

__all__ = ["ago", "curve", "number", "plain", "table", "view"]


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
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "nothing yet"
) -> RenderableType:
    """Columns whose name starts with '>' are right-aligned."""
    if not rows:
        return plain(f"{title}: {empty}", "dim")
    grid = Table(box=None, pad_edge=False, header_style="bold")
    widest = max(len(row[0]) for row in rows)  # what the others are about is never cut: other commands ask for it
    for i, name in enumerate(columns):
        least = min(widest, 60) if i == 0 else None
        grid.add_column(
            name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True, min_width=least
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


def view(snapshot: Snapshot | None, url: str, target: float | None = None, width: int = 80) -> RenderableType:
    """The live view: figures, return curve, versions and players of one game."""
    if snapshot is None:
        return Panel(Text("waiting for the first records…"), title="sparring", subtitle=plain(url))
    s = snapshot
    figures = Table.grid(padding=(0, 3))
    cells = [
        ("mean return, 20 episodes", number(s.return_mean)),
        ("players", str(s.active_players)),
        ("records/s", number(s.steps_per_s)),
        ("records", number(s.stats.steps)),
        ("newest version", "–" if s.latest is None else f"v{s.latest}"),
        ("updates", number(s.trainer.updates if s.trainer else 0)),
    ]
    figures.add_row(*(Text(name, style="dim") for name, _ in cells))
    figures.add_row(*(Text(value, style="bold") for _, value in cells))
    means = _even([(p.time, p.mean) for p in s.curve])
    plot = Text(curve(means, max(20, min(width - 14, 100)), 9, target) or "no finished episode yet", style="cyan")
    goal = f"return by time (goal {target:g})" if target is not None else "return by time"
    versions = table(
        "versions",
        ("version", ">steps seen", ">evaluation", ">played", ">return in play"),
        [
            (f"v{v.version}", number(v.steps), number(v.evaluation), str(v.played), number(v.return_mean))
            for v in reversed(s.versions[-6:])
        ],
    )
    players = table(
        "players", ("name", ">records", ">seen"), [(p.player, number(p.steps), ago(p.last_seen)) for p in s.players[:6]]
    )
    state = f"trainer: {s.trainer.algorithm}, {s.trainer.state}" if s.trainer else "trainer: starting"
    if s.paused:
        state = "trainer: paused"
    elif s.trainer and s.trainer.exploration is not None:
        state += f", {number(s.trainer.updates_per_s)} updates/s, exploring {s.trainer.exploration:.0%}"
    body = Group(
        figures,
        Text(),
        Text(goal, style="dim"),
        plot,
        Text(),
        Columns([versions, players], padding=(0, 4)),
        plain(state, "dim"),
    )
    title, subtitle = plain(f"sparring · {s.game}"), plain(f"dashboard {url}")
    return Panel(body, title=title, subtitle=subtitle, title_align="left", subtitle_align="left")
