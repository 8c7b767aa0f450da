"""A platform, its clock, and a real Chromium to look at its page."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from stage import Platform

from sparring.networks.policy import Policy
from sparring.registry.registry import Registry
from sparring.store.sqlite import SqliteStore

REFUSED = re.compile("status of 4(09|22)")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def platform(tmp_path: Path, random_policy: Callable[..., Policy]) -> Iterator[Platform]:
    store = SqliteStore(tmp_path / "store.db")
    yield Platform(store, Registry(tmp_path / "registry"), tmp_path / "trainer", random_policy)
    store.close()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`set_clock(-60)` makes it a minute ago, for a history as long as one likes; `set_clock(0)` makes it now."""
    true = time.time

    def move(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: true() + seconds)

    return move


@pytest.fixture(scope="module")  # not longer: while Playwright runs, no other test can have an event loop
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "the dashboard's tests need chromium: scripts/system-packages installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """`open_page(url, width=…, dark=…)`. The test fails if a page it opened had anything to complain about."""
    contexts, complaints = [], []

    def note(kind: str, text: str) -> None:
        # A server that is away, or refuses a change, is part of some tests: Chromium cannot be kept from telling of it.
        if kind in ("error", "warning") and "net::ERR_" not in text and not REFUSED.search(text):
            complaints.append(f"{kind}: {text}")

    def make(url: str, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1) -> Page:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=scale,
            reduced_motion="reduce",
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: note(message.type, f"{message.text} {message.location.get('url', '')}"))
        page.on("pageerror", lambda error: note("error", str(error)))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not complaints, complaints
