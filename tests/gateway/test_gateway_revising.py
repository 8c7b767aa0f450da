"""A game's life over the API: another name, a simulator, archived and back."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Reply, Setup, fragment, replaced, row

from sparring.experience import wire
from sparring.games import Box, Discrete, Game

PATH = f"/v1/games/{GAME.name}"
POLE = Game("pole", Box((4,)), Discrete(2))  # CartPole, as a person would declare it


def patch(api: Api, game: str, /, **change: Any) -> Reply:
    return api.request("PATCH", f"/v1/games/{game}", json.dumps(change).encode(), JSON)


def names(api: Api, query: str = "") -> list[str]:
    return [game["name"] for game in api.get(f"/v1/games{query}").json()]


def test_an_archived_game_is_in_no_list_and_still_there(api: Api, setup: Setup) -> None:
    assert patch(api, GAME.name, archived=True).status == 200
    assert (names(api), names(api, "?archived=true")) == ([], [GAME.name])
    assert api.get("/v1/games?archived=perhaps").status == 422
    assert api.request("POST", f"{PATH}/fragments", wire.encode([fragment()]), MSGPACK).status == 200
    assert setup.store.stats(GAME.name).fragments == 1
    assert patch(api, GAME.name, archived=False).status == 200
    assert names(api) == [GAME.name]


def test_a_renamed_game_has_both_names(api: Api, setup: Setup) -> None:
    assert patch(api, GAME.name, name="arena").status == 200
    assert names(api) == ["arena"]
    renamed = msgspec.structs.replace(GAME, name="arena")
    assert api.register(renamed).json()["name"] == GAME.name  # a client that declares it by its new name
    assert api.register(GAME).status == 200
    for name in ("arena", GAME.name):
        upload = f"/v1/games/{name}/fragments"
        assert api.request("POST", upload, wire.encode([replaced(fragment(), game=name)]), MSGPACK).status == 200
        assert api.request("POST", upload, json.dumps([row()]).encode(), JSON).status == 200
        assert api.get(f"/v1/games/{name}/stats").json()["game"] == GAME.name
    assert setup.store.stats(GAME.name).fragments == 4
    assert setup.store.stats("arena").fragments == 0
    alien = wire.encode([replaced(fragment(), game="chess")])
    assert api.request("POST", "/v1/games/arena/fragments", alien, MSGPACK).status == 422
    assert patch(api, "arena", name="colosseum").status == 200
    assert names(api) == ["colosseum"]
    [listed] = api.get("/v1/games").json()
    assert (listed["names"], listed["bot_steps"]) == ([GAME.name, "arena", "colosseum"], 0)
    assert api.get("/v1/games/arena").status == 200
    assert api.request("DELETE", "/v1/games/arena").status == 200
    assert (setup.store.games(), api.get(PATH).status) == ([], 404)


def test_a_name_that_is_taken_or_none_is_refused(api: Api) -> None:
    api.register(POLE)
    answer = patch(api, GAME.name, name="pole")
    assert (answer.status, "already" in answer.json()["detail"]) == (409, True)
    assert patch(api, GAME.name, name="a b").status == 422
    assert patch(api, GAME.name, nam="x").status == 422
    assert patch(api, "nobody", archived=True).status == 404
    assert names(api) == [GAME.name, "pole"]


def test_a_simulator_is_added_later_and_checked_at_once(api: Api, setup: Setup) -> None:
    api.register(POLE)
    for env, message in (
        ("CartPoole-v1", "CartPoole-v1 cannot be made"),
        ("Pendulum-v1", "Pendulum-v1 has the observations"),
        ("os:system", "names a module or file"),
        ("a\x1b[2J", "no control characters"),
    ):
        answer = patch(api, "pole", env=env)
        assert (answer.status, message in answer.json()["detail"]) == (422, True), answer.json()
    assert patch(api, "pole", env="CartPole-v1").json()["env"] == "CartPole-v1"
    assert [game.env for game in setup.store.games()] == [None, "CartPole-v1"]
    assert api.register(POLE).json()["env"] == "CartPole-v1"  # clients of before do not undo it
    assert patch(api, "pole", env=None).json()["env"] is None


def test_what_a_simulator_is_set_to_is_changed_and_checked_at_once(api: Api, setup: Setup) -> None:
    api.register(POLE)
    answer = patch(api, "pole", env_kwargs={"sutton_barto_reward": True})
    assert (answer.status, "has no simulator" in answer.json()["detail"]) == (422, True)
    answer = patch(api, "pole", env="CartPole-v1", env_kwargs={"sutton_barto_reward": True})
    assert answer.json()["env_kwargs"] == {"sutton_barto_reward": True}
    for wrong in ({"sutton": 1}, {"render_mode": "../file"}, {"sutton_barto_reward": {}}, [1]):
        assert patch(api, "pole", env_kwargs=wrong).status == 422, wrong
    assert setup.store.games()[1].env_kwargs == {"sutton_barto_reward": True}
    assert patch(api, "pole", archived=False).json()["env_kwargs"] == {"sutton_barto_reward": True}
    assert patch(api, "pole", env="CartPole-v1").json()["env_kwargs"] == {"sutton_barto_reward": True}
    assert "env_kwargs" not in patch(api, "pole", env="CartPole-v0").json()  # they were the other's
    patch(api, "pole", env_kwargs={"sutton_barto_reward": True})
    assert "env_kwargs" not in patch(api, "pole", env_kwargs=None).json()
    assert patch(api, "pole", env=None, env_kwargs={"sutton_barto_reward": True}).status == 422
    assert patch(api, "pole", env=None).json()["env"] is None


def python(path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Simulators are tried by this script, in the place of Python."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize("script", ["exit 0", "echo made; exit 0", "kill -9 $$"])
def test_a_simulator_that_ends_the_process_proves_nothing(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    api.register(POLE)
    python(tmp_path / "python", monkeypatch, script)
    answer = patch(api, "pole", env="CartPole-v1")
    assert (answer.status, "its process ended with" in answer.json()["detail"]) == (422, True)


def test_a_simulator_that_hangs_is_nobody_elses_trouble(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes end with the request, as when the gateway stops."""
    api.register(POLE)
    pids = tmp_path / "pids"
    python(
        tmp_path / "python",
        monkeypatch,
        f"trap '' TERM; sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait",
    )

    async def ends(pid: str) -> None:
        with contextlib.suppress(OSError):  # read while it ends
            while Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                await asyncio.sleep(0.01)

    async def hang() -> None:
        body = json.dumps({"env": "CartPole-v1"}).encode()
        trying = asyncio.ensure_future(api.send("PATCH", "/v1/games/pole", body, JSON))
        while not pids.exists():
            await asyncio.sleep(0.01)
        renamed = await api.send("PATCH", "/v1/games/pole", b'{"name": "stick"}', JSON)
        assert (renamed.status, trying.done()) == (200, False)
        trying.cancel()
        await asyncio.wait([trying])
        for pid in pids.read_text().split():
            await ends(pid)

    api.loop.run_until_complete(asyncio.wait_for(hang(), 30))
    assert names(api) == [GAME.name, "stick"]
