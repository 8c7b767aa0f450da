"""A browser game: a page of another origin, in a real Chromium, plays a step of a game that allows it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import urllib3
from playwright.sync_api import Browser
from stage import CARTPOLE, Platform

pytestmark = pytest.mark.real
PLAY = """async (server) => {
  const said = async (method, path, body, headers = {}) => {
    const request = {method, headers: {...headers, ...(body ? {"Content-Type": "application/json"} : {})}};
    if (body) request.body = JSON.stringify(body);
    const answer = await fetch(server + path, request);
    return [answer, await answer.json()];
  };
  try {
    const [shown, game] = await said("GET", "/v1/games/CartPole-v1");
    const schema = shown.headers.get("sparring-schema");
    const obs = [0, 0, 0, 0];
    const [, act] = await said("POST", "/v1/games/CartPole-v1/act", {obs: [obs], explore: true, schema});
    const {model, version, log_prob, action} = act;
    const step = {player: "page", schema, obs: [obs, obs], action, reward: [1], terminated: true};
    const [, stored] = await said("POST", "/v1/games/CartPole-v1/fragments", [{...step, model, version, log_prob}]);
    const [latest] = await said("GET", "/v1/games/CartPole-v1/models/bot/latest", null, {"If-None-Match": '"x"'});
    return {accepted: stored.accepted, name: game.name, model, latest: latest.status};
  } catch (error) {
    return {failed: error.name};
  }
}"""


class Empty(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a game</title><link rel=icon href=data:,>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def game_page() -> Iterator[str]:
    """A web server of its own: its pages have another origin than the gateway's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def declare(server: str, *origins: str) -> None:
    game = msgspec.structs.replace(CARTPOLE, origins=origins)
    headers = {"Content-Type": "application/json"}
    answer = urllib3.request("PUT", f"{server}/v1/games/{game.name}", body=game.to_json(), headers=headers)
    assert answer.status in (200, 201)


def test_a_page_of_an_allowed_origin_plays(platform: Platform, chromium: Browser, game_page: str) -> None:
    with platform.serve() as server:
        declare(server, game_page)
        page = chromium.new_page()  # not `open_page`, which complains about the 404 and the refusal
        page.goto(game_page)
        played = page.evaluate(PLAY, server)
        assert played == {"accepted": 1, "name": "CartPole-v1", "model": "random", "latest": 404}
        declare(server)
        assert page.evaluate(PLAY, server) == {"failed": "TypeError"}
        page.close()
    [kept] = platform.store.tail(CARTPOLE.name).fragments
    assert (kept.player, kept.model, kept.version, kept.steps) == ("page", "random", 0, 1)
    assert kept.log_prob is not None
