"""Managing a game on the dashboard: A/B tests, settings, generations, its name and its end. A real Chromium looks."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import picture
import pytest
import urllib3
from playwright.sync_api import Locator, Page, expect
from stage import CARTPOLE, OUTSIDE, WIDTHS_OF_TEXT, Platform, episode, set_text, upload

from sparring.dashboard import STATIC
from sparring.games import Box, Dict, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.networks.spec import Dense, QValues
from sparring.registry.ab import AbTest
from sparring.store.profile import GameSettings, Profile, PromotionRule, Revision

pytestmark = pytest.mark.real
expect.set_options(timeout=20_000)
ARENA = Game("arena", Dict({"place": Box((2,)), "weapon": Discrete(4)}), Discrete(3))
HOSTILE = "<img src=x onerror=\"window.pwned='img'\">"
NARROW = "\u202f"  # between a number and its unit


def opened(platform: Platform, game: Game = CARTPOLE) -> Platform:
    """With a first bot."""
    platform.store.register(game)
    platform.publish(evaluation=10.0, steps=100, game=game)
    return platform


def add_model(platform: Platform, model: str) -> None:
    policy = platform.make_policy(CARTPOLE, (Dense(8),), QValues())
    platform.registry.publish(policy, algorithm="dqn", model=model)


def set_for(platform: Platform, settings: GameSettings) -> None:
    platform.store.revise(CARTPOLE.name, lambda known: Revision(known.game, Profile(settings)))


def manage(url: str, game: Game = CARTPOLE) -> str:
    return f"{url}/#game={game.name}&view=manage"


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


def setting(page: Page, key: str) -> Locator:
    return page.locator(f'.setting[data-key="{key}"]')


def part(page: Page, name: str) -> Locator:
    """The row of this game's own section."""
    return page.locator(".life > div", has=page.get_by_text(name, exact=True))


def texts(cells: Locator) -> list[str]:
    return [text.replace(NARROW, " ").strip() for text in cells.all_inner_texts()]


def play(url: str, test: AbTest, people: int = 12) -> None:
    """Of each model's players: people, one bot's episode each; careful is 30 better."""
    played = []
    for model in test.shares:
        names = [name for name in (f"p{n}" for n in range(1000)) if test.model(name) == model][:people]
        for i, name in enumerate(names):
            length = 20 + i % 3 + (30 if model == "careful" else 0)
            played += [episode(length, name), msgspec.structs.replace(episode(length, name, 1), model=model)]
    upload(url, *played)


def test_an_ab_test_is_started_followed_and_ended(platform: Platform, open_page: Callable[..., Page]) -> None:
    add_model(opened(platform), "careful")
    with platform.serve() as url:
        page = open_page(manage(url))
        form = page.locator("#ab-form")
        expect(form.get_by_label("bot")).to_have_value("0.5")
        form.get_by_label("careful").fill("0.6")
        form.get_by_label("Reason").fill(HOSTILE)
        form.get_by_label("Reason").press("Enter")
        expect(page.locator("#ab-problem")).to_have_text("Not started: the shares add up to 1.1: they must add up to 1")
        form.get_by_label("careful").fill("0.5")
        form.get_by_role("button", name="start a test").click()
        expect(page.locator("#ab-about")).to_contain_text(f"person · {HOSTILE}")
        expect(form).to_be_hidden()
        running = platform.registry.ab(CARTPOLE.name).running
        assert running is not None
        assert (running.shares, running.reason) == ({"bot": 0.5, "careful": 0.5}, HOSTILE)

        play(url, running)
        expect(page.locator("#ab-verdict")).to_contain_text("careful is better than bot in people's play: +30")
        rows = [texts(row.locator("th, td")) for row in page.locator("#arms tbody tr").all()]
        assert [row[:6] for row in rows] == [
            ["bot", "50 %", "bots", "12", "", "21.0"],
            ["", "", "people", "12", "12", "21.0"],
            ["careful", "50 %", "bots", "12", "", "51.0"],
            ["", "", "people", "12", "12", "51.0"],
        ]
        assert re.fullmatch(r"\d\d\.\d … \d\d\.\d", rows[0][7])
        assert re.fullmatch(r"\+30\.0 \(\+\d\d\.\d … \+\d\d\.\d\)", rows[2][8])
        page.get_by_role("link", name="Play").click()
        expect(page.locator("#ab-shares-now")).to_have_text(f"bot 50{NARROW}%, careful 50{NARROW}%")
        page.get_by_role("link", name="results").click()

        page.get_by_role("button", name="keep careful").click()
        dialog(page).get_by_role("textbox").fill("clearly better")
        page.keyboard.press("Enter")
        expect(dialog(page)).to_be_hidden()
        expect(page.locator("#ab-about")).to_contain_text("players got careful")
        expect(page.get_by_role("button", name="keep careful")).to_be_hidden()
        expect(form).to_be_visible()
        assert page.evaluate("window.pwned === undefined")
    assert platform.registry.aliases(CARTPOLE.name, "bot")["stable"].version == 2
    assert platform.registry.ab(CARTPOLE.name).ended[0].kept == "careful"


def test_a_managed_game_makes_a_picture(platform: Platform, open_page: Callable[..., Page], tmp_path: Path) -> None:
    """Writes the picture of the documentation when SPARRING_PICTURES names a folder."""
    add_model(opened(platform), "careful")
    set_for(platform, GameSettings(promotion=PromotionRule(canary=0.2)))
    shares = {"bot": 0.5, "careful": 0.5}
    test = platform.registry.start_ab(CARTPOLE.name, shares, by="anna", reason="do people like another style?")
    with platform.serve() as url:
        play(url, test)
        page = open_page(manage(url), height=800, scale=1.5)
        expect(page.locator("#ab-verdict")).to_contain_text("careful is better")
        expect(page.locator("#settings .setting").first).to_be_visible()
        expect(page.locator("#generations > li")).to_have_count(1)
        path = Path(os.environ.get("SPARRING_PICTURES") or tmp_path) / "manage.png"
        picture.save(page, path)
        assert path.stat().st_size < 150_000


def test_only_the_test_that_is_shown_is_ended(platform: Platform, open_page: Callable[..., Page]) -> None:
    add_model(opened(platform), "careful")
    registry, halves = platform.registry, {"bot": 0.5, "careful": 0.5}
    registry.start_ab(CARTPOLE.name, halves, by="ann")
    with platform.serve() as url:
        page = open_page(manage(url))
        page.get_by_role("button", name="end the test").click()
        registry.end_ab(CARTPOLE.name)
        other = registry.start_ab(CARTPOLE.name, halves, by="bob", reason="meanwhile")
        dialog(page).get_by_role("button", name="End it").click()
        expect(dialog(page).get_by_role("alert")).to_contain_text("another A/B test of CartPole-v1 runs meanwhile")
        assert registry.ab(CARTPOLE.name).running == other
        dialog(page).get_by_role("button", name="Cancel").click()
        expect(page.locator("#ab-about")).to_contain_text("bob · meanwhile")
        expect(page.locator("#ended tbody tr")).to_have_count(1)
        page.get_by_role("button", name="end the test").click()
        dialog(page).get_by_role("button", name="End it").click()
        expect(page.locator("#ab-about")).to_contain_text("players got bot")
        expect(page.locator("#ended tbody tr .what")).to_have_text(f"bot 50{NARROW}%, careful 50{NARROW}%")
    assert registry.ab(CARTPOLE.name).running is None


def test_a_game_with_one_model_says_how_to_get_another(platform: Platform, open_page: Callable[..., Page]) -> None:
    with opened(platform).serve() as url:
        page = open_page(manage(url))
        expect(page.locator("#ab-few-text")).to_contain_text("this game has only bot")
        expect(page.locator("#ab-few code")).to_have_text("sparring publish RUN --game CartPole-v1 --model careful")
        expect(page.locator("#ab-form")).to_be_hidden()


def test_settings_are_shown_with_who_set_them(platform: Platform, open_page: Callable[..., Page]) -> None:
    opened(platform)
    set_for(platform, GameSettings(promotion=PromotionRule(canary=0.25), hyperparameters={"lr": 0.002}))
    defaults = GameSettings(pace=7)
    with background(create_app(platform.store, platform.registry, defaults=defaults)) as url:
        page = open_page(manage(url))
        expect(page.locator("#settings-trainer")).to_have_text("No trainer works on this game.")
        canary = setting(page, "promotion.canary")
        expect(canary.get_by_role("textbox")).to_have_value("0.25")
        expect(canary.locator(".whose")).to_have_text("set for this game")
        expect(setting(page, "hyperparameters.lr").get_by_role("textbox")).to_have_value("0.002")
        expect(setting(page, "pace").get_by_role("textbox")).to_have_attribute("placeholder", "7")
        expect(setting(page, "pace").locator(".whose")).to_have_text("set for all games")
        expect(setting(page, "algorithm").get_by_role("textbox")).to_have_attribute("placeholder", "dqn")
        expect(setting(page, "promotion.alpha").get_by_role("textbox")).to_have_attribute("placeholder", "0.05")
        expect(setting(page, "promotion.alpha").locator(".whose")).to_have_text("")
        setting(page, "hyperparameters.lr").get_by_role("button", name="reset").click()
        expect(setting(page, "hyperparameters.lr")).to_have_count(0)
    assert platform.store.profiles()[CARTPOLE.name].settings == GameSettings(promotion=PromotionRule(canary=0.25))


def test_a_setting_is_changed_or_refused_beside_its_field(platform: Platform, open_page: Callable[..., Page]) -> None:
    opened(platform)
    set_for(platform, GameSettings(pace=5))
    with platform.serve() as url:
        page = open_page(manage(url))
        field, problem = page.get_by_label("promotion.canary"), setting(page, "promotion.canary").get_by_role("alert")
        expect(field).to_have_attribute("placeholder", "0.1")
        field.fill("2")
        field.press("Enter")
        expect(problem).to_have_text("Not set: promotion.canary: expected `float` <= 1.0")
        expect(field).to_have_value("2")
        field.fill("lots")
        field.press("Enter")
        expect(problem).to_contain_text("got `str`")
        field.press("Escape")
        expect(problem).to_be_hidden()
        expect(field).to_have_value("")
        field.fill("0.3")
        setting(page, "promotion.canary").get_by_role("button", name="set", exact=True).click()
        expect(setting(page, "promotion.canary").locator(".whose")).to_have_text("set for this game")
        wanted = GameSettings(promotion=PromotionRule(canary=0.3), pace=5)
        assert platform.store.profiles()[CARTPOLE.name].settings == wanted

        page.get_by_label("algorithm", exact=False).first.fill("pppo")
        page.keyboard.press("Enter")
        expect(setting(page, "algorithm").get_by_role("alert")).to_contain_text("did you mean 'ppo'?")
        page.get_by_label("Name of a further hyperparameter").fill("layers")
        page.get_by_label("Value of the further hyperparameter").fill('[{"layer": "evil:Layer"}]')
        page.keyboard.press("Enter")
        expect(page.locator("#add-problem")).to_contain_text("names a module")
        assert platform.store.profiles()[CARTPOLE.name].settings == wanted


def test_every_setting_has_a_field() -> None:
    text = (STATIC / "settings.js").read_text().split("const MEANINGS = {")[1].split("};")[0]
    keys = set(re.findall(r'^  "?([\w.]+)"?:', text, re.MULTILINE))
    own = {*GameSettings.__struct_fields__} - {"promotion", "hyperparameters"}
    assert keys == own | {f"promotion.{name}" for name in PromotionRule.__struct_fields__}


def test_a_game_is_renamed_and_found_by_its_old_name(platform: Platform, open_page: Callable[..., Page]) -> None:
    opened(platform).store.register(Game("duel", Box((2,)), Discrete(3)))
    with platform.serve() as url:
        page = open_page(manage(url))
        expect(part(page, "Name")).to_contain_text(CARTPOLE.name)
        page.get_by_role("button", name="rename").click()
        field = dialog(page).get_by_label("New name")
        expect(field).to_have_value(CARTPOLE.name)
        field.fill("duel")
        page.keyboard.press("Enter")
        expect(dialog(page).get_by_role("alert")).to_contain_text("there is a game 'duel' already")
        field.fill("pole")
        page.keyboard.press("Enter")
        expect(part(page, "Name")).to_contain_text("also found as CartPole-v1")
        expect(page.get_by_role("combobox", name="Game")).to_have_value("pole")
        assert urlsplit(page.url).fragment == "game=pole&view=manage"
        page.goto("about:blank")
        page.goto(f"{url}/#game=CartPole-v1")
        expect(page.get_by_role("combobox", name="Game")).to_have_value("pole")


def test_training_is_paused_and_resumed(platform: Platform, open_page: Callable[..., Page]) -> None:
    with opened(platform).serve() as url:
        page = open_page(manage(url))
        expect(part(page, "Training")).to_contain_text("on")
        page.get_by_role("button", name="pause").click()
        expect(part(page, "Training")).to_contain_text("paused; play is stored")
        assert platform.store.paused() == {CARTPOLE.name}
        page.get_by_role("button", name="resume").click()
        expect(page.get_by_role("button", name="pause")).to_be_visible()
        assert not platform.store.paused()


def test_a_game_is_archived_after_a_question_and_brought_back(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    opened(platform).store.register(Game("duel", Box((2,)), Discrete(3)))
    with platform.serve() as url:
        page = open_page(manage(url))
        page.get_by_role("button", name="archive").click()
        page.keyboard.press("Escape")
        assert not platform.store.profiles().get(CARTPOLE.name, Profile()).archived
        page.get_by_role("button", name="archive").click()
        dialog(page).get_by_role("button", name="Archive").click()
        expect(page.get_by_text("This game is archived")).to_be_visible()
        expect(page.locator("#game optgroup[label=Archived] option")).to_have_text(CARTPOLE.name)
        assert platform.store.profiles()[CARTPOLE.name].archived
        page.goto("about:blank")
        page.goto(url)
        expect(page.get_by_role("combobox", name="Game")).to_have_value("duel")
        page.get_by_role("combobox", name="Game").select_option(CARTPOLE.name)
        page.get_by_role("button", name="bring it back").click()
        expect(page.get_by_text("This game is archived")).to_be_hidden()
        expect(page.locator("#game optgroup")).to_have_count(0)


def test_a_game_is_deleted_when_its_name_is_typed(platform: Platform, open_page: Callable[..., Page]) -> None:
    opened(platform).store.register(Game("duel", Box((2,)), Discrete(3)))
    with platform.serve() as url:
        page = open_page(manage(url))
        page.get_by_role("button", name="delete").click()
        yes = dialog(page).get_by_role("button", name="Delete")
        expect(yes).to_be_disabled()
        field = dialog(page).get_by_label("Type CartPole-v1 to delete it")
        field.fill("CartPole")
        page.keyboard.press("Enter")
        expect(yes).to_be_disabled()
        assert len(platform.store.games()) == 2
        field.fill(CARTPOLE.name)
        expect(yes).to_be_enabled()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("duel")
        expect(part(page, "Name")).to_contain_text("duel")
    assert [game.name for game in platform.store.games()] == ["duel"]
    assert platform.registry.versions(CARTPOLE.name, "bot") == []


def change(url: str, **fields: object) -> None:
    """A new generation with further fields of the observation."""
    declared = json.loads(ARENA.to_json())
    declared["observation"]["fields"] |= fields
    body = json.dumps({"game": declared, "confirmed": True})
    headers = {"content-type": "application/json"}
    answer = urllib3.request("POST", f"{url}/v1/games/arena/generations", body=body, headers=headers)
    assert answer.status == 201, answer.data


def test_generations_tell_what_changed_and_lead_to_each_other(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    opened(platform, ARENA).store.append([episode(30, game=ARENA), episode(12, version=1, game=ARENA)])
    with platform.serve() as url:
        change(url, shield={"type": "box", "shape": []})
        page = open_page(manage(url, ARENA))
        items = page.locator("#generations > li")
        expect(items).to_have_count(2)
        expect(items.nth(0).locator(".number")).to_have_text("generation 2, continues arena")
        expect(items.nth(0).locator(".changes li").first).to_contain_text("you added shield")
        expect(items.nth(0).locator(".changes code").first).to_have_text("shield")
        expect(items.nth(0).locator(".play")).to_have_text("no bot yet · not played yet")
        expect(items.nth(1).locator(".number")).to_have_text("generation 1, shown here")
        expect(items.nth(1).locator(".play")).to_have_text(
            "its players get v1 · 42 steps of its own, 30 people’s, 12 bots’"
        )
        page.get_by_role("link", name="arena.2").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("arena.2")
        expect(items.nth(0).locator(".number")).to_contain_text("shown here")
        expect(part(page, "Name")).to_contain_text("arena.2")


def test_a_new_generation_is_made_after_it_said_what_would_change(
    platform: Platform, open_page: Callable[..., Page]
) -> None:
    with opened(platform, ARENA).serve() as url:
        page = open_page(manage(url, ARENA))
        page.get_by_role("button", name="change its spaces").click()
        text, problem = dialog(page).get_by_label("The new declaration"), dialog(page).get_by_role("alert")
        expect(text).to_have_value(re.compile('"weapon"'))
        look = dialog(page).get_by_role("button", name="Look what changes")
        look.click()
        expect(problem).to_have_text("Not done: arena has these spaces already")
        declared = text.input_value()
        text.fill("{")
        look.click()
        expect(problem).to_contain_text("the declaration is no JSON")
        text.fill(declared.replace('"n": 4', '"n": 5').replace('"n": 3', '"n": -1'))
        look.click()
        expect(problem).to_contain_text("action")
        text.fill(declared.replace('"n": 4', '"n": 5'))
        look.click()
        expect(dialog(page).get_by_role("status")).to_contain_text("weapon has 5 values, it had 4")
        assert len(platform.store.games()) == 1
        dialog(page).get_by_role("button", name="Make generation 2").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("arena.2")
        expect(page.locator("#generations > li")).to_have_count(2)
    assert platform.store.profiles()["arena.2"].origin is not None


def test_a_game_of_which_all_was_rejected_tells_why(platform: Platform, open_page: Callable[..., Page]) -> None:
    platform.store.register(CARTPOLE)
    platform.store.quarantine(CARTPOLE.name, "ada", "bad", "obs has NaN or infinite values")
    with platform.serve() as url:
        page = open_page(url)
        page.get_by_role("button", name="1 fragment rejected so far").click()
        expect(page.locator("#rejections .why")).to_have_text("obs has NaN or infinite values")


@pytest.mark.parametrize(("width", "dark"), [(320, False), (390, True), (1280, False)])
def test_nothing_hangs_out_and_versions_are_promoted_on_a_phone(
    platform: Platform, open_page: Callable[..., Page], width: int, dark: bool
) -> None:
    opened(platform).publish(evaluation=20.0, steps=200)
    long = "x" * 60
    add_model(platform, long)
    set_for(platform, GameSettings(hyperparameters={"y" * 80: "z" * 80}))
    platform.registry.start_ab(CARTPOLE.name, {"bot": 0.5, long: 0.5}, by="ann", reason="r" * 200)
    with platform.serve() as url:
        page = open_page(manage(url), width=width, dark=dark)
        expect(page.locator("#arms tbody tr")).to_have_count(4)
        expect(page.locator("#settings .setting")).to_have_count(12)
        assert page.evaluate(OUTSIDE) == []
        boxes = [button.bounding_box() for button in page.locator(".manage button:visible").all()]
        assert all(box and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        page.get_by_role("link", name="Play").click()
        page.get_by_role("row", name="v1").get_by_role("button", name="promote").click()
        dialog(page).get_by_role("button", name="Promote").click()
        expect(page.locator("#stable")).to_have_text("v1")
        assert page.evaluate(OUTSIDE) == []
        for view in ("Play", "Manage"):
            page.get_by_role("link", name=view).click()
            for percent in WIDTHS_OF_TEXT:
                set_text(page, percent)
                assert page.evaluate(OUTSIDE) == []
