"""The dashboard as a person sees it: a real Chromium before a real gateway."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import picture
import pytest
import urllib3
from playwright.sync_api import Locator, Page, expect
from stage import CARTPOLE, Platform, episode, snapshot, upload

from sparring.api import StreamStatus, TrainerStatus
from sparring.files import write_whole
from sparring.games import Box, Discrete, Game
from sparring.gateway.app import background, create_app

pytestmark = pytest.mark.real
expect.set_options(timeout=20_000)
NONE = "–"
HOSTILE = (
    "<img src=x onerror=\"window.pwned='img'\">",
    "<script>window.pwned='script'</script>",
    '"><svg onload=window.pwned=1>',
    "{{constructor.constructor('window.pwned=1')()}}",
)


def figure(page: Page, name: str) -> Locator:
    """The large number under a name."""
    return page.locator("#figures > div", has=page.get_by_text(name, exact=True)).locator("dd").first


def rows(page: Page, table: str) -> list[list[str]]:
    bodies = page.get_by_role("table", name=re.compile(f"^{table}")).locator("tbody tr").all()
    return [[plain(cell) for cell in row.locator("th, td").all_inner_texts()] for row in bodies]


def plain(text: str) -> str:
    return text.replace("\u202f", " ").strip()


def points(page: Page) -> int:
    """How many points the line was drawn through."""
    return len(re.findall("[ML]", page.locator("#curve path.mean").get_attribute("d") or ""))


def expect_points(page: Page, count: int) -> None:
    """The first picture may come before the gateway has read everything."""
    expect(page.locator("#curve path.mean")).to_have_attribute("d", re.compile(f"^([ML][^ML]*){{{count}}}$"))


def moments(url: str) -> int:
    """At how many different times episodes ended, as far as the API tells them apart."""
    return len({point.time for point in snapshot(url).curve})


def fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def live(page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("live")


def play(platform: Platform) -> list[int]:
    """50 episodes by two versions and a human; their returns, oldest first."""
    lengths = [10 + 3 * i + i % 2 for i in range(50)]
    platform.store.register(CARTPOLE)
    for i, length in enumerate(lengths):
        version = None if i < 10 else 1 if i < 30 else 2
        platform.store.append([episode(length, f"player-{i % 3}", version)])
    platform.publish(evaluation=61.25, steps=300)
    platform.publish(evaluation=140.0, steps=1500)
    return lengths


def test_before_anything_was_played_the_page_says_what_to_type_and_then_fills(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    with platform.serve() as url:
        page = open_page(url)
        live(page)
        expect(page.get_by_role("heading", name="Nothing has been played yet.")).to_be_visible()
        command = page.locator("code")
        expect(command).to_be_visible()
        assert command.text_content() == f"sparring play CartPole-v1 --server {url} --players 4"

        platform.store.register(CARTPOLE)
        expect(page.get_by_role("heading", name="Nobody has played CartPole-v1 yet.")).to_be_visible()
        upload(url, episode(42))
        expect(figure(page, "Mean return")).to_have_text("42.0")
        expect(command).to_be_hidden()


def test_a_declared_game_without_play_is_not_offered_to_mock_players(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    platform.store.register(Game("duel", observation=Box((2,)), action=Discrete(3)))
    with platform.serve() as url:
        page = open_page(url)
        expect(page.get_by_text(f"record its play with sparring.client and send it to {url}")).to_be_visible()
        expect(page.locator("code")).to_be_hidden()


def test_figures_and_tables_show_the_data(platform: Platform, open_page: Callable[..., Page]) -> None:
    lengths = play(platform)
    platform.say(
        TrainerStatus(
            CARTPOLE.name,
            "dqn",
            "training",
            updates=12_345,
            updates_per_s=183.42,
            lag=3,
            window=50_000,
            loss=0.021339,
            exploration=0.05,
            evaluation=140.0,
            updated=time.time(),
        )
    )
    with platform.serve() as url:
        page = open_page(url)
        live(page)
        mean = np.mean(lengths[-20:])
        expect(figure(page, "Mean return")).to_have_text(f"{mean:.1f}")
        expect(page.get_by_text("newest 20 of 50 episodes")).to_be_visible()
        expect(figure(page, "Best mean")).to_have_text(f"{mean:.1f}")
        expect(figure(page, "Newest version")).to_have_text("v2")
        expect(figure(page, "Active players")).to_have_text("3")
        assert sum(lengths) == 4200
        assert plain(figure(page, "Steps stored").inner_text()) == "4.2 k"
        assert figure(page, "Steps stored").get_attribute("title") == "4,200"
        expect(page.get_by_text("rejected")).to_be_hidden()
        assert page.title() == f"{mean:.1f} · CartPole-v1 · Sparring"

        first, second = np.mean(lengths[10:30]), np.mean(lengths[30:])
        table = [[*row[:1], *row[2:]] for row in rows(page, "Versions")]
        assert table == [
            ["v2", "1.5 k", "140.0", "20", f"{second:.1f}", f"+{second - first:.1f}"],
            ["v1", "300", "61.3", "20", f"{first:.1f}", NONE],
        ]
        players = {name: steps for name, steps, _ in rows(page, "Players")}
        assert players == {f"player-{k}": f"{sum(lengths[k::3]) / 1000:.3g} k" for k in range(3)}
        expect(page.locator("#players tr.active")).to_have_count(3)

        said = page.locator("#trainer > div").all()
        assert {(d := [plain(t) for t in div.locator("dt, dd").all_inner_texts()])[0]: d[1] for div in said} == {
            "State": "training",
            "Updates": "12.3 k, 183.4 per second",
            "Loss": "0.0213",
            "Exploration": "5 %",
            "Evaluation": "140.0",
            "Replay window": "50 k transitions",
            "Lag": "3 fragments",
        }


def test_the_curve_has_every_point_and_version_and_tells_its_numbers(
    platform: Platform, open_page: Callable[..., Page], set_clock: Callable[[float], None]
) -> None:
    platform.store.register(CARTPOLE)
    began = time.time() - 600
    lengths = [10 + i % 7 + i for i in range(60)]
    for i, length in enumerate(lengths):
        set_clock(-600 + 10 * i)
        platform.store.append([episode(length)])
    set_clock(0)
    for i in range(4):
        platform.publish(evaluation=10.0, steps=100, created=began + 120 * (i + 1))
    with platform.serve() as url:
        page = open_page(url)
        live(page)
        expect_points(page, 60)
        assert moments(url) == 60
        marks = page.locator("#curve .mark")
        expect(marks.locator("text")).to_have_text(["v1", "v2", "v3", "v4"])
        at = [float(line.get_attribute("x1") or 0) for line in marks.locator("line").all()]
        assert np.allclose(np.diff(at), np.diff(at)[0], atol=1), "published every two minutes, so evenly spaced"

        plot = page.locator("#plot")
        box = plot.bounding_box()
        assert box
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
        tip = page.locator("#tip")
        newest = lengths[-20:]
        expect(tip).to_contain_text(f"mean {np.mean(newest):.1f}")
        expect(tip).to_contain_text(f"{min(newest)}.0 to {max(newest)}.0 in 20 episodes")
        expect(tip).to_contain_text("played without a bot")
        expect(figure(page, "Mean return")).to_have_text(f"{np.mean(newest):.1f}")
        page.mouse.move(0, 0)
        expect(tip).to_be_hidden()

        plot.focus()
        page.keyboard.press("Home")
        expect(tip).to_contain_text(f"mean {lengths[0]}.0")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#readout")).to_contain_text(f"mean {np.mean(lengths[:2]):.1f}")
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()

        by_time = page.locator("#curve path.mean").get_attribute("d")
        expect(page.locator("#curve .grid")).to_contain_text(re.compile(r"\d\d:\d\d"))
        page.get_by_role("radio", name="by steps").check()
        expect(page.locator("#curve .grid")).to_contain_text(re.compile(r"1(\.5)?\u202fk"))
        assert page.locator("#curve path.mean").get_attribute("d") != by_time
        page.reload()
        expect(page.get_by_role("radio", name="by steps")).to_be_checked()


def test_new_play_and_a_new_version_arrive_without_a_reload(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    with platform.serve() as url:
        page = open_page(url)
        live(page)
        page.evaluate("window.sameDocument = true")
        before = points(page)
        upload(url, *[episode(500, "newcomer", 2) for _ in range(20)])
        expect(figure(page, "Mean return")).to_have_text("500.0")
        expect(page.get_by_role("rowheader", name="newcomer")).to_be_visible()
        expect(figure(page, "Steps per second")).not_to_have_text("0")
        assert moments(url) > before
        expect_points(page, moments(url))

        platform.publish(evaluation=487.5, steps=14_000)
        expect(page.get_by_role("status")).to_have_text("version 3 published, evaluation 487.5")
        expect(figure(page, "Newest version")).to_have_text("v3")
        expect(page.locator("#curve .mark")).to_have_count(3)
        assert rows(page, "Versions")[0][0] == "v3"
        assert page.evaluate("window.sameDocument")


def test_it_says_when_the_server_is_away_and_finds_it_again(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    with platform.serve() as url:
        page = open_page(url)
        live(page)
    status = page.get_by_role("status")
    expect(status).to_have_text("connection lost, retrying")
    expect(figure(page, "Newest version")).to_have_text("v2")
    platform.store.append([episode(500, "meanwhile") for _ in range(20)])
    with platform.serve(urlsplit(url).port or 0):
        live(page)
        expect(figure(page, "Mean return")).to_have_text("500.0")
        upload(url, *[episode(400, "afterwards") for _ in range(20)])
        expect(figure(page, "Mean return")).to_have_text("400.0")


def test_names_are_text_whatever_they_are(platform: Platform, open_page: Callable[..., Page]) -> None:
    platform.store.register(CARTPOLE)
    with platform.serve() as url:
        for name in HOSTILE:
            upload(url, episode(10, name))
        page = open_page(url)
        live(page)
        expect(page.locator("#players tbody tr")).to_have_count(len(HOSTILE))
        assert {row[0] for row in rows(page, "Players")} == set(HOSTILE)
        assert page.locator("#players").locator("img, script, svg").count() == 0
        assert page.evaluate("window.pwned === undefined")


def test_rejected_fragments_are_told(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    for i in range(12):
        platform.store.quarantine(CARTPOLE.name, "ada", f"bad-{i}", "obs has NaN or infinite values")
    with platform.serve() as url:
        expect(open_page(url).get_by_text("12 fragments rejected so far")).to_be_visible()


def test_a_trainer_that_failed_or_went_silent_is_told(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    platform.say(TrainerStatus(CARTPOLE.name, "dqn", "training", updated=time.time() - 125))
    with platform.serve() as url:
        page = open_page(url)
        state = page.locator("#trainer-state")
        expect(state).to_have_text(re.compile("training, silent for 2\u202fmin"))
        platform.say(TrainerStatus(CARTPOLE.name, "dqn", "failed: the loss is not finite", updated=time.time()))
        expect(state).to_have_text("failed: the loss is not finite")


def test_a_paused_game_is_told(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    platform.say(TrainerStatus(CARTPOLE.name, "dqn", "training", updated=time.time() - 125))
    with platform.serve() as url:
        page = open_page(url)
        state = page.locator("#trainer-state")
        expect(state).to_have_text(re.compile("silent"))
        assert urllib3.request("POST", f"{url}/v1/games/{CARTPOLE.name}/pause").status == 200
        expect(state).to_have_text("paused")
        assert urllib3.request("POST", f"{url}/v1/games/{CARTPOLE.name}/resume").status == 200
        expect(state).to_have_text(re.compile("silent"))


def test_a_deleted_game_leaves_the_page(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    lander = Game("LunarLander-v3", Box((8,)), Discrete(4), env="LunarLander-v3")
    platform.store.register(lander)
    platform.store.append([episode(100, "neil", game=lander, reward=-2.5) for _ in range(3)])
    with platform.serve() as url:
        page = open_page(f"{url}/#game={CARTPOLE.name}")
        live(page)
        assert urllib3.request("DELETE", f"{url}/v1/games/{CARTPOLE.name}").status == 200
        expect(figure(page, "Mean return")).to_have_text("−250.0")


def test_the_stream_tells_how_far_its_job_is_behind(
    platform: Platform, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    play(platform)
    path = tmp_path / "status.json"

    def say(**news: Any) -> None:
        status = StreamStatus("arena", "running", steps=1200, records=7, updated=time.time())
        write_whole(path, msgspec.json.encode(msgspec.structs.replace(status, **news)))

    say(lag=130.0, rejected=2)
    with background(create_app(platform.store, platform.registry, stream_status=path)) as url:
        line = open_page(url).locator("#stream")
        expect(line).to_have_text(re.compile("Stream arena: 2\u202fmin behind; .* from 7 records, 2 rejected"))
        say()
        expect(line).to_have_text(re.compile("Stream arena: caught up"))
        say(updated=time.time() - 125)
        expect(line).to_have_text(re.compile("silent for 2\u202fmin"))


def test_several_games_are_chosen_in_the_header_and_kept_in_the_address(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    play(platform)
    lander = Game("LunarLander-v3", observation=Box((8,)), action=Discrete(4), env="LunarLander-v3")
    platform.store.register(lander)
    platform.store.append([episode(100, "neil", game=lander, reward=-2.5) for _ in range(3)])
    with platform.serve() as url:
        page = open_page(url)
        live(page)
        expect(figure(page, "Newest version")).to_have_text("v2")
        page.get_by_label("Game").select_option("LunarLander-v3")
        expect(figure(page, "Mean return")).to_have_text("−250.0")
        expect(page.get_by_role("rowheader", name="neil")).to_be_visible()
        expect(page.get_by_text("No trainer works on this game.")).to_be_visible()
        assert urlsplit(page.url).fragment == "game=LunarLander-v3"
        page.reload()
        expect(figure(page, "Mean return")).to_have_text("−250.0")
        page.goto(f"{url}/#game=CartPole-v1")
        expect(figure(page, "Newest version")).to_have_text("v2")


@pytest.mark.parametrize("width", [320, 390, 820, 1280, 1920])
def test_nothing_hangs_out_of_the_window(platform: Platform, open_page: Callable[..., Page], width: int) -> None:
    with platform.serve() as url:
        page = open_page(url, width=width)
        expect(page.locator("code")).to_be_visible()
        assert fits(page)
        play(platform)
        upload(url, episode(123_4, "x" * 200, 2), episode(9, "lorem ipsum " * 12, 2))
        platform.store.quarantine(CARTPOLE.name, "ada", "bad", "obs has NaN or infinite values")
        platform.say(TrainerStatus(CARTPOLE.name, "dqn", "failed: " + "w" * 200, updated=time.time()))
        expect(page.locator("#players tbody tr")).to_have_count(5)
        expect(page.locator("#trainer-state")).to_contain_text("failed")
        assert fits(page)


def test_long_tables_open_on_demand(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    for i in range(3, 13):
        platform.publish(evaluation=i, steps=i)
    with platform.serve() as url:
        page = open_page(url)
        expect(page.locator("#versions tbody tr")).to_have_count(7)
        assert [row[0] for row in rows(page, "Versions")] == [f"v{n}" for n in range(12, 5, -1)]
        page.get_by_role("button", name="show all 12").click()
        expect(page.locator("#versions tbody tr")).to_have_count(12)
        expect(page.locator("#curve .mark")).to_have_count(12)


def test_numbers_and_times_are_written_for_people(platform: Platform, open_page: Callable[..., Page]) -> None:
    wanted = {
        "count(0)": "0",
        "count(999)": "999",
        "count(1000)": "1 k",
        "count(12345)": "12.3 k",
        "count(999600)": "1 M",
        "count(null)": NONE,
        "number(312.44)": "312.4",
        "number(-0.5)": "−0.5",
        "number(0.002134)": "0.00213",
        "number(0.0000123)": "1.2e−5",
        "number(-12345)": "−12.3 k",
        "number(NaN)": NONE,
        "signed(3)": "+3.0",
        "signed(-3)": "−3.0",
        "percent(0.051)": "5.1 %",
        "plural(1, 'step')": "1 step",
        "ago(-3)": "just now",
        "ago(12.9)": "12 s ago",
        "ago(179)": "2 min ago",
        "ago(90000)": "25 h ago",
        "ago(3 * 86400)": "3 days ago",
    }
    with platform.serve() as url:
        page = open_page(url)
        page.evaluate("async () => { window.format = await import('./static/format.js') }")
        assert {call: plain(page.evaluate(f"window.format.{call}")) for call in wanted} == wanted


PLAYERS = ("grace", "ada", "edsger", "barbara")
SPEED = 310  # steps per second and player


def learn(platform: Platform, set_clock: Callable[[float], None], seconds: int = 120) -> np.random.Generator:
    """Two minutes in which four players, and the versions that they play with, get good at CartPole."""
    rng = np.random.default_rng(4)
    platform.store.register(CARTPOLE)
    free_at = dict.fromkeys(PLAYERS, 0.0)
    steps, version = 0, None
    for at in (tick / 4 for tick in range(4 * seconds)):
        set_clock(at - seconds)
        skill = 1 / (1 + np.exp(-(at - 68) / 10))
        if at % 9 == 8:
            evaluation = min(500.0, 24 + 480 * skill * rng.uniform(0.92, 1.08))
            version = platform.publish(evaluation, steps).version
        played = []
        for player in PLAYERS:
            while free_at[player] < at:
                length = int(np.clip(rng.gamma(3 + 9 * skill) / (3 + 9 * skill) * (22 + 500 * skill), 8, 500))
                played.append(episode(length, player, version))
                free_at[player] += length / SPEED
                steps += length
        platform.store.append(played)
    set_clock(0)
    platform.say(
        TrainerStatus(
            CARTPOLE.name,
            "dqn",
            "training",
            updates=18_240,
            updates_per_s=164.7,
            steps=steps,
            lag=2,
            window=50_000,
            loss=0.01482,
            exploration=0.05,
            evaluation=493.6,
            updated=time.time() + 60,
        )
    )
    return rng


def test_a_learning_bot_makes_a_picture(
    platform: Platform, open_page: Callable[..., Page], set_clock: Callable[[float], None], tmp_path: Path
) -> None:
    """Writes the pictures of the documentation when SPARRING_PICTURES names a folder."""
    rng = learn(platform, set_clock)
    folder = Path(os.environ.get("SPARRING_PICTURES") or tmp_path)
    with platform.serve() as url, playing(url, rng):
        deadline = time.monotonic() + 30
        while snapshot(url).steps_per_s < 1000 and time.monotonic() < deadline:
            time.sleep(0.2)
        page = open_page(url, scale=2)
        live(page)
        expect(figure(page, "Newest version")).to_have_text("v13")
        expect(figure(page, "Steps per second")).not_to_have_text("0")
        assert float(figure(page, "Mean return").inner_text()) > 400
        assert points(page) > 100
        expect(page.locator("#spark path")).to_have_attribute("d", re.compile("(L.*){20}"))
        picture.save(page, folder / "dashboard.png")
        assert (folder / "dashboard.png").stat().st_size < 300_000


@contextmanager
def playing(url: str, rng: np.random.Generator) -> Iterator[None]:
    """The players play on and upload over HTTP."""
    done = threading.Event()

    def play_on() -> None:
        pause = 0.0
        while not done.wait(pause):
            lengths = rng.integers(430, 501, len(PLAYERS))
            upload(url, *[episode(int(n), player, 13) for n, player in zip(lengths, PLAYERS, strict=True)])
            pause = float(lengths.mean()) / SPEED

    thread = threading.Thread(target=play_on)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
