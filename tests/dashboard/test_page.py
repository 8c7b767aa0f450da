"""The dashboard as a person sees it: a real Chromium before a real gateway."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import picture
import pytest
import urllib3
from playwright.sync_api import Locator, Page, expect
from stage import CARTPOLE, OUTSIDE, WIDTHS_OF_TEXT, Platform, episode, set_text, snapshot, upload

from sparring.api import StreamStatus, TrainerStatus
from sparring.files import write_whole
from sparring.games import Box, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.networks.spec import Dense, QValues

pytestmark = pytest.mark.real
expect.set_options(timeout=20_000)
NONE = "–"
BOTS, PEOPLE = "Bots’ mean return", "People’s mean return"
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


def points(page: Page, who: str = "bots") -> int:
    """How many points the line was drawn through."""
    return len(re.findall("[ML]", page.locator(f"#curve path.mean.{who}").get_attribute("d") or ""))


def expect_points(page: Page, count: int, who: str = "bots") -> None:
    """The first picture may come before the gateway has read everything."""
    expect(page.locator(f"#curve path.mean.{who}")).to_have_attribute("d", re.compile(f"^([ML][^ML]*){{{count}}}$"))


def moments(url: str, who: str = "bots") -> int:
    """At how many different times episodes ended, as far as the API tells them apart."""
    return len({point.time for point in getattr(snapshot(url), who).curve})


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
        command = page.locator("#command")
        expect(command).to_be_visible()
        assert command.text_content() == f"sparring play CartPole-v1 --server {url} --players 4"

        platform.store.register(CARTPOLE)
        expect(page.get_by_role("heading", name="Nobody has played CartPole-v1 yet.")).to_be_visible()
        upload(url, episode(42))
        expect(figure(page, PEOPLE)).to_have_text("42.0")
        expect(figure(page, BOTS)).to_have_text(NONE)
        expect(command).to_be_hidden()


def test_a_declared_game_without_play_is_not_offered_to_mock_players(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    platform.store.register(Game("duel", observation=Box((2,)), action=Discrete(3)))
    with platform.serve() as url:
        page = open_page(url)
        expect(page.get_by_text(f"record its play with sparring.client and send it to {url}")).to_be_visible()
        expect(page.locator("#command")).to_be_hidden()


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
        expect(figure(page, BOTS)).to_have_text(f"{mean:.1f}")
        expect(page.locator("#bots-note")).to_have_text(f"newest 20 of 40 episodes, best {mean:.1f}")
        expect(figure(page, PEOPLE)).to_have_text(f"{np.mean(lengths[:10]):.1f}")
        expect(page.locator("#people-note")).to_have_text("newest 10 of 10 episodes")
        expect(page.get_by_title("A return is the total reward of an episode.")).to_have_count(3)
        expect(figure(page, "Players get")).to_have_text("v2")
        expect(figure(page, "Active players")).to_have_text("3")
        assert sum(lengths) == 4200
        assert plain(figure(page, "Steps stored").inner_text()) == "4.2 k"
        assert figure(page, "Steps stored").get_attribute("title") == "4,200"
        assert plain(page.locator("#steps-apart").inner_text()) == f"{sum(lengths[:10])} people’s, 3.96 k bots’"
        expect(page.get_by_text("rejected so far")).to_be_hidden()
        assert page.title() == f"{mean:.1f} · CartPole-v1 · Sparring"

        first, second = np.mean(lengths[10:30]), np.mean(lengths[30:])
        expect(page.locator("#versions tbody .role").first).to_have_text("stable")
        margins = [1.96 * np.std(some, ddof=1) / 20**0.5 for some in (lengths[10:30], lengths[30:])]
        assert [[row[0].split()[0], *row[2:7]] for row in rows(page, "Versions")] == [
            ["v2", "1.5 k", "140.0", "20", f"{second:.1f} ± {margins[1]:.1f}", f"+{second - first:.1f}"],
            ["v1", "300", "61.3", "20", f"{first:.1f} ± {margins[0]:.1f}", NONE],
        ]
        for k, row in enumerate(sorted(rows(page, "Players"))):
            person, bot = lengths[k:10:3], lengths[10 + (k - 10) % 3 :: 3][-20:]
            expected = [f"player-{k}", "both", f"{sum(lengths[k::3]) / 1000:.3g} k"]
            assert row[:5] == [*expected, f"{np.mean(person):.1f}", f"{np.mean(bot):.1f}"]
        expect(page.locator("#players tr.active")).to_have_count(3)

        assert said(page) == {
            "State": "training",
            "Updates": "12.3 k, 183.4 per second",
            "Loss": "0.0213",
            "Exploration": "5 %",
            "Evaluation": "140.0",
            "Replay window": "50 k steps",
            "Not learned from yet": "3 fragments",
        }
        expect(page.locator("#behind")).to_have_text("3 fragments not learned from yet")


def said(page: Page) -> dict[str, str]:
    """What is shown of the trainer."""
    divs = page.locator("#trainer dl > div:visible").all()
    return {(texts := [plain(text) for text in div.locator("dt, dd").all_inner_texts()])[0]: texts[1] for div in divs}


def test_figures_fit_the_algorithm(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    ppo = TrainerStatus(CARTPOLE.name, "ppo", "waiting for play", window=12, updated=time.time() + 60, on_policy=True)
    platform.say(msgspec.structs.replace(ppo, gathered=12, needed=2048))
    with platform.serve() as url:
        page = open_page(url)
        expect(page.locator("#progress-text")).to_have_text("12 of 2,048 steps needed to begin")
        assert page.locator("#progress").evaluate("bar => bar.value / bar.max") == 12 / 2048
        expect(page.locator("#behind")).to_be_hidden()
        learned = {"loss/policy": -0.01, "loss/value": 0.5, "policy/entropy": 0.69, "policy/kl": 0.001, "value/mean": 3}
        used = {"people_steps": 0, "bot_steps": 2048, "left_out": {"people's, without log_prob": 500}}
        platform.say(msgspec.structs.replace(ppo, updates=1, gathered=12, needed=2048, metrics=learned, **used))
        expect(page.locator("#progress-text")).to_be_hidden()
        expect(page.get_by_text("Policy entropy")).to_be_visible()
        assert said(page) == {
            "State": "waiting for play",
            "Updates": "1, 0 per second",
            "Loss (policy)": "−0.01",
            "Loss (value)": "0.5",
            "Policy entropy": "0.69",
            "Policy kl": "0.001",
            "Waits for the next update": "12 steps",
            "Learns from": "0 steps of people, 2.05 k of bots",
            "Leaves out": "500 steps: people's, without log_prob",
            "Not learned from yet": "none",
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
        expect_points(page, 60, "people")
        assert moments(url, "people") == 60
        assert points(page, "bots") == 0
        expect(page.locator("#key-people")).to_be_visible()
        expect(page.locator("#key-bots")).to_be_hidden()
        marks = page.locator("#curve .mark")
        expect(marks.locator("text")).to_have_text(["v1", "v2", "v3", "v4"])
        at = [float(dot.get_attribute("cx") or 0) for dot in marks.locator("circle").all()]
        assert np.allclose(np.diff(at), np.diff(at)[0], atol=1), "published every two minutes, so evenly spaced"

        plot = page.locator("#plot")
        box = plot.bounding_box()
        assert box
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
        tip = page.locator("#tip")
        newest = lengths[-20:]
        expect(tip).to_contain_text(f"people: mean {np.mean(newest):.1f}")
        expect(tip).to_contain_text(f"{min(newest)}.0 to {max(newest)}.0 in 20 episodes")
        expect(tip).not_to_contain_text("played by")
        expect(figure(page, PEOPLE)).to_have_text(f"{np.mean(newest):.1f}")
        page.mouse.move(0, 0)
        expect(tip).to_be_hidden()

        plot.focus()
        page.keyboard.press("Home")
        expect(tip).to_contain_text(f"mean {lengths[0]}.0")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#readout")).to_contain_text(f"mean {np.mean(lengths[:2]):.1f}")
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()

        by_time = page.locator("#curve path.mean.people").get_attribute("d")
        expect(page.locator("#curve .grid")).to_contain_text(re.compile(r"\d\d:\d\d"))
        page.get_by_role("radio", name="by steps").check()
        expect(page.locator("#curve .grid")).to_contain_text(re.compile(r"1(\.5)?\u202fk"))
        assert page.locator("#curve path.mean.people").get_attribute("d") != by_time
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
        expect(figure(page, BOTS)).to_have_text("500.0")
        expect(page.get_by_role("rowheader", name="newcomer")).to_be_visible()
        expect(figure(page, "Steps per second")).not_to_have_text("0")
        assert moments(url) > before
        expect_points(page, moments(url))

        platform.publish(evaluation=487.5, steps=14_000)
        expect(page.get_by_role("status")).to_have_text("version 3 published, evaluation 487.5")
        expect(figure(page, "Players get")).to_have_text("v3")
        expect(page.locator("#curve .mark title").last).to_have_text(re.compile("v3|v1–3"))  # may lie beside the others
        assert rows(page, "Versions")[0][0].split()[0] == "v3"
        assert page.evaluate("window.sameDocument")


def test_it_says_when_the_server_is_away_and_finds_it_again(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    with platform.serve() as url:
        page = open_page(url)
        live(page)
    status = page.get_by_role("status")
    expect(status).to_have_text("connection lost, retrying")
    expect(figure(page, "Players get")).to_have_text("v2")
    platform.store.append([episode(500, "meanwhile") for _ in range(20)])
    with platform.serve(urlsplit(url).port or 0):
        live(page)
        expect(figure(page, PEOPLE)).to_have_text("500.0")
        upload(url, *[episode(400, "afterwards") for _ in range(20)])
        expect(figure(page, PEOPLE)).to_have_text("400.0")


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


def test_rejected_fragments_are_reported(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    for i in range(12):
        platform.store.quarantine(CARTPOLE.name, HOSTILE[0], f"bad-{i}", "obs has NaN or infinite values")
    with platform.serve() as url:
        page = open_page(url)
        button = page.get_by_role("button", name="12 fragments rejected so far")
        expect(button).to_have_attribute("aria-expanded", "false")
        expect(page.locator("#rejections")).to_be_hidden()
        button.click()
        expect(page.locator("#rejections tbody tr")).to_have_count(7)
        assert rows(page, "12 fragments")[0][1:] == [HOSTILE[0], "obs has NaN or infinite values"]
        button.press("Enter")
        expect(page.locator("#rejections")).to_be_hidden()


def test_a_trainer_that_failed_or_went_silent_is_reported(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    platform.say(TrainerStatus(CARTPOLE.name, "dqn", "training", updated=time.time() - 125))
    with platform.serve() as url:
        page = open_page(url)
        state = page.locator("#trainer-state")
        expect(state).to_have_text(re.compile("training, silent for 2\u202fmin"))
        platform.say(TrainerStatus(CARTPOLE.name, "dqn", "failed: the loss is not finite", updated=time.time()))
        expect(state).to_have_text("failed: the loss is not finite")


def test_a_paused_game_is_reported(platform: Platform, open_page: Callable[..., Page]) -> None:
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
        expect(figure(page, PEOPLE)).to_have_text("−250.0")


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
        expect(figure(page, "Players get")).to_have_text("v2")
        page.get_by_role("combobox", name="Game").select_option("LunarLander-v3")
        expect(figure(page, PEOPLE)).to_have_text("−250.0")
        expect(page.get_by_role("rowheader", name="neil")).to_be_visible()
        expect(page.get_by_text("No trainer works on this game.")).to_be_visible()
        assert urlsplit(page.url).fragment == "game=LunarLander-v3"
        page.reload()
        expect(figure(page, PEOPLE)).to_have_text("−250.0")
        page.goto(f"{url}/#game=CartPole-v1")
        expect(figure(page, "Players get")).to_have_text("v2")


@pytest.mark.parametrize("width", [320, 390, 820, 1280, 1920])
def test_nothing_hangs_out_of_the_window(platform: Platform, open_page: Callable[..., Page], width: int) -> None:
    with platform.serve() as url:
        page = open_page(url, width=width)
        expect(page.locator("#command")).to_be_visible()
        assert fits(page)
        play(platform)
        upload(url, episode(123_4, "x" * 200, 2), episode(9, "lorem ipsum " * 12, 2))
        platform.store.quarantine(CARTPOLE.name, "ada", "bad", "obs has NaN or infinite values")
        platform.say(TrainerStatus(CARTPOLE.name, "dqn", "failed: " + "w" * 200, updated=time.time()))
        expect(page.locator("#players tbody tr")).to_have_count(5)
        expect(page.locator("#trainer-state")).to_contain_text("failed")
        assert fits(page)
        for percent in WIDTHS_OF_TEXT:
            set_text(page, percent)
            assert fits(page)
            assert page.evaluate(OUTSIDE) == []


def test_long_tables_open_on_demand(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    for i in range(3, 13):
        platform.publish(evaluation=i, steps=i)
    with platform.serve() as url:
        page = open_page(url)
        expect(page.locator("#versions tbody tr")).to_have_count(7)
        assert [row[0].split()[0] for row in rows(page, "Versions")] == [f"v{n}" for n in range(12, 5, -1)]
        page.locator("#versions-more").click()
        expect(page.locator("#versions tbody tr")).to_have_count(12)


def test_many_versions_merge_into_dots_that_stay_apart(platform: Platform, open_page: Callable[..., Page]) -> None:
    platform.store.register(CARTPOLE)
    platform.store.append([episode(20), episode(30, version=1)])
    began = time.time() - 3600
    for i in range(60):
        platform.publish(evaluation=i, steps=i, created=began + 3600 * (i if i else -30) / 60)
    with platform.serve() as url:
        page = open_page(url, width=390)
        dots = page.locator("#curve .mark circle")
        expect(dots).not_to_have_count(0)
        shape = "dots => dots.map(d => [d.cx.baseVal.value, d.r.baseVal.value])"
        at = sorted(dots.evaluate_all(shape))
        assert len(at) < 30
        assert all(a + r <= b - q for (a, r), (b, q) in pairwise(at)), "no dot touches the next one"
        titles = page.locator("#curve .mark title").all_text_contents()
        assert [int(name) for name in re.findall(r"^v(\d+)", titles[0])] == [1]
        assert re.search(r"60\b", titles[-1])
        page.locator("#versions tbody tr").nth(3).hover()
        expect(page.locator("#curve .pointer text")).to_have_text("v57")
        expect(page.locator("#curve .pointer")).to_have_attribute("visibility", "visible")


def test_what_players_get_and_why(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    platform.publish(evaluation=150.0, steps=2000)
    move = platform.registry.move
    move(CARTPOLE.name, "bot", "stable", 2, reason="3 is not sure", by="ann")
    move(CARTPOLE.name, "bot", "candidate", 3, reason="to be compared", by="trainer", share=0.1)
    policy = platform.make_policy(CARTPOLE, (Dense(8),), QValues())
    platform.registry.publish(policy, algorithm="bc", model="imitation")
    trial = {"candidate": 3, "evidence": "7 of at least 10 episodes", "decision": "version 1 was rejected: worse"}
    platform.say(TrainerStatus(CARTPOLE.name, "dqn", "training", updated=time.time() + 60, **trial))
    with platform.serve() as url:
        page = open_page(url)
        expect(page.locator("#stable")).to_have_text("v2")
        expect(page.locator("#stable-why")).to_contain_text("ann · 3 is not sure")
        expect(page.locator("#candidate")).to_have_text("v3 in 10\u202f% of the episodes")
        expect(page.locator("#candidate-why")).to_have_text("7 of at least 10 episodes")
        expect(page.locator("#decision")).to_have_text("version 1 was rejected: worse")
        expect(page.locator("#models")).to_have_text("imitation: 1 version, players get v1")
        assert [row[:2] for row in rows(page, "Moves")][:2] == [
            ["candidate: v3", "trainer: to be compared"],
            ["stable: v3 → v2", "ann: 3 is not sure"],
        ]
        assert [row[0].split()[1:] for row in rows(page, "Versions")] == [["candidate"], ["stable"], []]
        for link in page.locator("#versions a, #models a").all():
            assert page.request.get(link.evaluate("link => link.href")).ok


def test_a_first_candidate_is_shown_before_players_get_a_version(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    platform.store.register(CARTPOLE)
    policy = platform.make_policy(CARTPOLE, (Dense(8),), QValues())
    platform.registry.publish(policy, algorithm="dqn", alias=None)
    platform.registry.move(CARTPOLE.name, "bot", "candidate", 1, reason="to be compared", by="trainer", share=0.75)
    trial = {"candidate": 1, "evidence": "7 of at least 10 episodes"}
    platform.say(TrainerStatus(CARTPOLE.name, "dqn", "training", updated=time.time() + 60, **trial))
    with platform.serve() as url:
        upload(url, episode(9))
        page = open_page(url)
        expect(page.locator("#candidate")).to_have_text("v1 in 75\u202f% of the episodes")
        expect(page.locator("#candidate-why")).to_have_text("7 of at least 10 episodes")
        expect(page.locator("#serving-empty")).to_have_text("Random play, until a version is better.")
        expect(page.locator("#stable-part")).to_be_hidden()
        assert [row[0].split() for row in rows(page, "Versions")] == [["v1", "candidate"]]


def test_names_of_ones_own_stand_beside_their_version(platform: Platform, open_page: Callable[..., Page]) -> None:
    play(platform)
    for name, version in (("tournament", 1), ("easy", 1), ("hard", 2)):
        platform.registry.move(CARTPOLE.name, "bot", name, version, reason="mine", by="ann")
    with platform.serve() as url:
        page = open_page(url)
        first, second = (page.locator(f'#versions tr[data-version="{version}"]') for version in (1, 2))
        expect(first.locator(".role")).to_have_text("easy, tournament")
        expect(second.locator(".role")).to_have_text("stable, hard")
        expect(first.get_by_role("button", name="promote")).to_be_visible()
        expect(second.get_by_role("button", name="promote")).to_be_hidden()


def test_a_page_that_is_behind_says_so(
    platform: Platform, open_page: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparring.gateway.live.PAGE", 1)
    monkeypatch.setattr("sparring.gateway.live.MAX_PAGES", 1)
    platform.store.register(CARTPOLE)
    with platform.serve() as url:
        upload(url, *[episode(9) for _ in range(90)])
        page = open_page(url)
        expect(page.locator("#behind")).to_have_text("newer episodes are still being read")
        monkeypatch.setattr("sparring.gateway.live.PAGE", 1000)
        expect(page.locator("#behind")).to_have_text("")
        expect(figure(page, PEOPLE)).to_have_text("9.0")


def test_versions_are_promoted_rolled_back_and_pinned_after_a_question(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    play(platform)
    with platform.serve() as url:
        page = open_page(url)
        stable, dialog = page.locator("#stable"), page.get_by_role("dialog")
        expect(stable).to_have_text("v2")
        page.get_by_role("row", name="v1").get_by_role("button", name="promote").click()
        expect(dialog.get_by_role("heading")).to_have_text("Promote v1?")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(stable).to_have_text("v2")

        page.get_by_role("row", name="v1").get_by_role("button", name="promote").click()
        dialog.get_by_role("textbox").fill("beginners like it")
        page.keyboard.press("Enter")
        expect(stable).to_have_text("v1")
        expect(figure(page, "Players get")).to_have_text("v1")
        moved = platform.registry.moves(CARTPOLE.name, "bot")[0]
        assert (moved.alias, moved.version, moved.by, moved.reason) == ("stable", 1, "person", "beginners like it")

        page.get_by_role("button", name="roll back").click()
        dialog.get_by_role("button", name="Roll back").click()
        expect(stable).to_have_text("v2")
        page.get_by_role("button", name="pin", exact=True).click()
        dialog.get_by_role("button", name="Pin").click()
        expect(stable).to_have_text("v2, pinned")
        page.get_by_role("button", name="unpin").click()
        dialog.get_by_role("button", name="Unpin").click()
        expect(stable).to_have_text("v2")

        page.get_by_role("button", name="roll back").click()
        platform.registry.move(CARTPOLE.name, "bot", "stable", 1, reason="quicker", by="bob")  # meanwhile
        dialog.get_by_role("button", name="Roll back").click()
        expect(dialog.get_by_role("alert")).to_contain_text("somebody moved it meanwhile")
        dialog.get_by_role("button", name="Cancel").click()
        expect(stable).to_have_text("v1")


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


PLAYERS = ("grace", "ada", "arena-1", "arena-2")  # two people, two bots
SPEED = 310  # steps per second and player


def learn(platform: Platform, set_clock: Callable[[float], None], seconds: int = 120) -> np.random.Generator:
    """Two minutes in which two bots get good at CartPole, and two people stay as they are."""
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
            gain = f"better than version {version - 1} in 40 paired episodes" if version > 1 else "the first version"
            platform.registry.move(CARTPOLE.name, "bot", "stable", version, reason=gain, by="trainer")
        played = []
        for player in PLAYERS:
            while free_at[player] < at:
                bot = player.startswith("arena")
                mean, spread = (22 + 500 * skill, 3 + 9 * skill) if bot else (190, 12)
                length = int(np.clip(rng.gamma(spread) / spread * mean, 8, 500))
                played.append(episode(length, player, (version or 0) if bot else None))
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
            people_steps=steps // 2,
            bot_steps=steps - steps // 2,
            metrics={"loss/q": 0.01482, "q/mean": 41.7},
            decision="version 13 was promoted: better than version 12 in 40 paired episodes: +21.4 (95 %: +9.8 … +33)",
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
        page = open_page(url, height=1040, scale=1.5)
        live(page)
        expect(figure(page, "Players get")).to_have_text("v13")
        expect(figure(page, "Steps per second")).not_to_have_text("0")
        assert float(figure(page, BOTS).inner_text()) > 400
        assert min(points(page), points(page, "people")) > 50
        expect(page.locator("#spark path")).to_have_attribute("d", re.compile("(L.*){20}"))
        picture.save(page, folder / "dashboard.png")
        assert (folder / "dashboard.png").stat().st_size < 200_000


@contextmanager
def playing(url: str, rng: np.random.Generator) -> Iterator[None]:
    """The players play on and upload over HTTP."""
    done = threading.Event()

    def play_on() -> None:
        pause = 0.0
        while not done.wait(pause):
            lengths = rng.integers(430, 501, len(PLAYERS))
            both = list(zip(lengths, PLAYERS, strict=True))
            shown = [(n, player, 13) if player.startswith("arena") else (n // 3, player, None) for n, player in both]
            upload(url, *[episode(int(n), player, version) for n, player, version in shown])
            pause = float(lengths.mean()) / SPEED

    thread = threading.Thread(target=play_on)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
