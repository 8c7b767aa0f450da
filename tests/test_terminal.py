"""What people see in the terminal: figures, curves and tables, whatever the names in them are."""

import io
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console, RenderableType

from sparring.api import CurvePoint, Play, PlayerRow, RecentReturns, Snapshot, TrainerStatus, VersionRow
from sparring.store.protocol import Stats
from sparring.terminal import ago, curve, number, plain, table, view

NOW = 1.8e9
STYLE = r"\x1b\[[0-9;]*m"  # the escape sequences that are ours: colours
HOSTILE = [
    "[bold]x[/bold]", "[/]", "[link=http://evil]y[/link]", ":smile:", "\x1b[31mred", "\x1b]0;title\x07", "\x9b2J",
    "back\x08\x08", "over\rwritten", "two\nlines", "\u202eright to left", "\0", "\ud800", "漢字 🎮 é", "x" * 200, "",
]  # fmt: skip


def rendered(what: RenderableType, width: int = 80, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(what)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def snapshot(**fields: Any) -> Snapshot:
    steps = np.cumsum(np.arange(1, 41))
    points = [CurvePoint(NOW + i, int(s), 5.0 * i, 4.0 * i, 6.0 * i, 10, 1) for i, s in enumerate(steps)]
    full = Snapshot(
        game="CartPole-v1",
        time=NOW,
        stats=Stats(fragments=1234, steps=56_789, players=3, bytes=10**6, rejected=2),
        steps_per_s=1987.6,
        fragments_per_s=20.5,
        active_players=3,
        episodes=400,
        return_mean=187.25,
        return_best=200.0,
        length_mean=187.0,
        latest=7,
        published=NOW - 3,
        versions=[
            VersionRow(v, NOW - 100 + v, 1000 * v, None if v == 1 else 20.0 * v, v, 19.5 * v) for v in range(1, 8)
        ],
        players=[PlayerRow(f"player-{i:03d}", 10 * i, 1000 * i, NOW - i) for i in range(1, 9)],
        curve=points,
        people=Play(100, 88.5, 90.0, 88.0, 6_789, points),
        bots=Play(300, 187.25, 200.0, 187.0, 50_000, points),
        trainer=TrainerStatus("CartPole-v1", "dqn", "training", 4567, 312.5, 56_000, exploration=0.08),
    )
    return msgspec.structs.replace(full, **fields)


# Figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0"), (0.0, "0"), (5, "5"), (5.0, "5"), (-5, "-5"), (0.5, "0.5"), (0.12345, "0.123"),
        (99.94, "99.9"), (123.4, "123"), (999, "999"), (999.4, "999"), (999.6, "1 k"), (1000, "1 k"), (1234, "1.23 k"),
        (12_345, "12.3 k"), (-12_345, "-12.3 k"), (999_400, "999 k"), (999_600, "1 M"), (1e6, "1 M"), (2.5e9, "2.5 G"),
        (3e12, "3 T"), (1 << 20, "1.05 M"), (np.float32(7), "7"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_numbers(value: Any, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (5, "5 B"), (2048, "2.05 kB"), (0.5, "0.5 B"), (3e6, "3 MB")])
def test_numbers_with_a_unit(value: Any, text: str) -> None:
    assert number(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s ago"), (-5, "0 s ago"), (4.4, "4 s ago"), (59, "59 s ago"), (60, "1 min ago"), (119, "2 min ago"),
        (3600, "1 h ago"), (86_399, "24 h ago"), (86_400, "1 d ago"), (1e8, "1157 d ago"),
    ],
)  # fmt: skip
def test_ago(seconds: float, text: str) -> None:
    assert ago(NOW - seconds, NOW) == text


def test_ago_of_never_and_of_now() -> None:
    assert ago(None) == "–"
    assert ago(NOW * 2) == "0 s ago"


# Curves


def dots(text: str) -> Any:
    """The plot as an array of dots, its top row first."""
    rows = [line.split("┤")[1] for line in text.split("\n")]
    out = np.zeros((4 * len(rows), 2 * len(rows[0])), bool)
    places = (
        (0x01, 0, 0),
        (0x02, 1, 0),
        (0x04, 2, 0),
        (0x40, 3, 0),
        (0x08, 0, 1),
        (0x10, 1, 1),
        (0x20, 2, 1),
        (0x80, 3, 1),
    )
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            for bit, down, right in places:
                out[4 * y + down, 2 * x + right] = bool((ord(cell) - 0x2800) & bit)
    return out


def test_no_curve_of_nothing() -> None:
    assert curve([]) == ""


@pytest.mark.parametrize(
    "values", [[5.0], [5.0] * 100, [0.0], [0.0, 0.0], [-3.0] * 7, list(range(1000)), [1e-300], [1e300, -1e300]]
)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 3), (60, 8)])
def test_a_curve_has_its_size_and_a_dot_everywhere(values: list[float], width: int, height: int) -> None:
    lines = curve(values, width, height).split("\n")
    assert len(lines) == height
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0].split("┤")[1]) == width
    assert all(0x2800 <= ord(c) <= 0x28FF for line in lines for c in line.split("┤")[1])
    assert dots("\n".join(lines)).any(axis=0).all()


def test_a_rising_curve_rises() -> None:
    plot = dots(curve(list(range(100)), 30, 5))
    heights = plot.shape[0] - plot.argmax(axis=0)
    assert (np.diff(heights) >= 0).all()
    assert (heights[0], heights[-1]) == (1, 20)


def test_a_constant_is_a_line_at_its_place() -> None:
    assert dots(curve([5.0] * 9, 10, 2)).tolist() == [[True] * 20] + [[False] * 20] * 7
    assert dots(curve([-5.0] * 9, 10, 2)).tolist() == [[False] * 20] * 7 + [[True] * 20]


def test_a_jump_is_a_line_without_gaps() -> None:
    plot = dots(curve([0.0, 10.0], 10, 4))
    assert plot[:, 10].all()


def test_the_axis_tells_the_span_and_holds_the_goal() -> None:
    lines = curve([1.0, 250.0], 20, 4, top=500.0).split("\n")
    assert (lines[0].split("┤")[0].strip(), lines[-1].split("┤")[0].strip()) == ("500", "0")
    assert curve([-1200.0, -300.0], 20, 4, top=0.0).split("\n")[0].split("┤")[0].strip() == "0"
    assert curve([-1200.0, -300.0], 20, 4).split("\n")[-1].split("┤")[0].strip() == "-1.2 k"


# Tables and the view


def test_a_table() -> None:
    lines = rendered(table("things", ("name", ">count"), [("apple", "1"), ("fig", "1000")])).splitlines()
    assert [line.rstrip() for line in lines] == ["things", "name   count", "apple      1", "fig     1000"]


def test_a_whole_table_cuts_nothing_at_eighty_columns() -> None:
    columns = ("player", "plays as", ">steps", ">episodes", ">return", ">seen")
    name = "0c3a29627441c7a9-0c3a29627441c7a9-of-a-long-name"
    row = (name, "both", "56.8 k", "123 k", "45.2 / 187", "12 min ago")
    out = rendered(table("players", columns, [row], whole=True), 80)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert all(cell in out for cell in row[1:])
    lines = [line[: out.splitlines()[1].index("plays")].strip() for line in out.splitlines()[2:]]
    assert "".join(lines) == name


def test_an_empty_table_says_so() -> None:
    assert rendered(table("things", ("name",), [])) == "things: nothing yet\n"
    assert rendered(table("[red]", ("name",), [], "[/] none")) == "[red]: [/] none\n"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_the_view_fits_its_terminal(width: int, colour: bool) -> None:
    out = rendered(view(snapshot(), "http://127.0.0.1:8400", 475.0, width), width, colour)
    assert ("\x1b" in out) is colour
    out = re.sub(STYLE, "", out)
    assert {len(line) for line in out.splitlines()} == {width}
    assert all(part in out for part in ("sparring · CartPole-v1", "http://127.0.0.1:8400", "goal 475", "187"))


def test_the_view_tells_what_there_is() -> None:
    out = rendered(view(snapshot(), "http://x", 475.0, 120), 120)
    for text in (
        "56.8 k",
        "v7",
        "1.99 k",
        "player-001",
        "4.57 k",
        "trainer: dqn, training",
        "312 updates/s",
        "exploring 8%",
    ):
        assert text in out
    assert "player-007" not in out  # the newest six
    assert out.index("v7") < out.index("v6")


def test_the_view_has_people_and_bots_apart() -> None:
    both = PlayerRow(
        "ann", 2, 30, NOW, 20, "both", RecentReturns(5, 7.0), RecentReturns(2, 3.25), RecentReturns(3, 9.5)
    )
    out = rendered(view(snapshot(players=[both]), "http://x", None, 120), 120)
    for text in ("people's return", "88.5", "bots' return", "187", "people's return by time", "both", "3.25 / 9.5"):
        assert text in out
    alone = rendered(view(snapshot(people=Play()), "http://x", None, 120), 120)
    assert "people's return by time" not in alone
    assert "bots' return by time" in alone


def test_a_server_that_does_not_tell_them_apart_still_has_a_curve() -> None:
    out = rendered(view(snapshot(people=Play(), bots=Play()), "http://x", None, 120), 120)
    assert "no finished episode" not in out
    assert "return by time" in out


@pytest.mark.parametrize(
    ("status", "text", "absent"),
    [
        ({"needed": 2048, "gathered": 12, "on_policy": True}, "12 of 2,048 steps needed", "exploring"),
        ({"needed": 500, "gathered": 900, "updates": 3, "exploration": 0.5}, "exploring 50%", "needed"),
        ({"lag": 12}, "12 fragments not learned from yet", "candidate"),
        ({"candidate": 4, "evidence": "3 of at least 10 episodes"}, "candidate: v4, 3 of at least 10", "decision"),
        ({"decision": "version 3 was rejected: worse"}, "last decision: version 3 was rejected: worse", "candidate"),
    ],
)
def test_the_view_says_where_the_trainer_stands(status: dict[str, Any], text: str, absent: str) -> None:
    trainer = TrainerStatus("CartPole-v1", "ppo", "training", **status)
    out = rendered(view(snapshot(trainer=trainer), "http://x", None, 120), 120)
    assert text in out
    assert absent not in out


def test_the_view_before_there_is_anything() -> None:
    assert "waiting for the first steps" in rendered(view(None, "http://x"))
    nothing = {"return_mean": None, "latest": None, "versions": [], "players": [], "curve": [], "trainer": None}
    nothing |= {"people": Play(), "bots": Play()}
    out = rendered(view(snapshot(**nothing), "http://x"))
    for text in ("no finished episode yet", "versions: nothing yet", "players: nothing yet", "trainer: starting"):
        assert text in out


def test_the_view_says_what_becomes_of_the_play() -> None:
    trainer = TrainerStatus("CartPole-v1", "dqn", "training", people_steps=87_800, bot_steps=12_000)
    out = rendered(view(snapshot(trainer=trainer), "http://x"), width=120)
    assert "it uses 87,800 steps of people, 12,000 of bots" in out
    assert "leaves out" not in out
    trainer = msgspec.structs.replace(trainer, left_out={"bots', without log_prob": 300, "too old": 7}, people_steps=1)
    assert trainer.use == "uses 1 step of people, 12,000 of bots; leaves out 300: bots', without log_prob, 7: too old"
    assert trainer.use in rendered(view(snapshot(trainer=trainer), "http://x"), width=120)
    assert "uses" not in rendered(view(snapshot(), "http://x"))  # an older trainer does not say


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("width", [60, 120])
def test_names_of_others_are_only_text(name: str, width: int) -> None:
    hostile = snapshot(
        game=name,
        players=[PlayerRow(name, 1, 1, NOW)],
        trainer=TrainerStatus(name, name, f"failed: {name}", exploration=0.1, left_out={name: 1}),
    )
    shown = [
        view(hostile, f"http://{name}", None, width),
        view(None, name),
        table(name, ("name",), [(name,)]),
        plain(name),
    ]
    for what in shown:
        for colour in (False, True):
            out = re.sub(STYLE, "", rendered(what, width, colour))
            assert all(c.isprintable() or c == "\n" for c in out)


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/]", "[link=http://e]y[/link]", ":smile:", "\\[a]"])
def test_markup_is_shown_and_not_obeyed(name: str) -> None:
    for what in (
        view(snapshot(players=[PlayerRow(name, 1, 1, NOW)]), "http://x", None, 120),
        table(name, ("a",), [("b",)]),
    ):
        assert name in rendered(what, 120)


def test_a_name_of_several_lines_stays_in_its_row() -> None:
    out = rendered(table("players", ("name", "seen"), [("two\nlines", "now"), ("one", "then")]))
    assert [line.split() for line in out.splitlines()] == [
        ["players"],
        ["name", "seen"],
        ["two", "now"],
        ["lines"],
        ["one", "then"],
    ]
