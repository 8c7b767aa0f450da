"""The page's files: light, on their own, and readable in both themes."""

import re
from pathlib import Path

import pytest

from sparring.dashboard import STATIC

NAMED = re.compile(r"--(\w+): (#[0-9a-f]{6});")


def test_the_whole_page_is_light() -> None:
    assert {path.name for path in STATIC.iterdir()} >= {"index.html", "dashboard.js", "dashboard.css", "favicon.svg"}
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 120_000


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_nothing_is_fetched_from_elsewhere_or_written_as_markup(path: Path) -> None:
    text = path.read_text().replace('"http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "raised"])
@pytest.mark.parametrize("ink", ["ink", "muted", "pine", "indigo", "persimmon", "bad"])
def test_text_stands_out(theme: str, ground: str, ink: str) -> None:
    """WCAG 2.2 AA asks for 4.5 : 1."""
    light, dark = (STATIC / "dashboard.css").read_text().split("prefers-color-scheme: dark", 1)
    colours = dict(NAMED.findall(light if theme == "light" else dark))
    assert contrast(colours[ink], colours[ground]) >= 4.5


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * w for c, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))
