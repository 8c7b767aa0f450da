"""The documentation: the site builds without a warning, loads nothing from elsewhere, and no link is broken, neither on
the site nor between the files as a forge shows them."""

import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FILES = sorted(ROOT.glob("*.md")) + PAGES
# What a browser fetches by itself when it shows a page.
FETCHED = {"script": "src", "img": "src", "source": "src", "video": "src", "iframe": "src", "link": "href"}


def copied(folder: Path) -> Path:
    """All that the site is made of. The site goes where its configuration is."""
    shutil.copy(ROOT / "zensical.toml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("src", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def build(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env |= {"ZENSICAL": str(Path(sys.executable).parent / "zensical")}
    command = ["scripts/docs-site"]
    return subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(tmp_path_factory.mktemp("docs"))
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


class Html(HTMLParser):
    """Where a page's links go, what it fetches, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif FETCHED.get(tag) in given and given.get("rel") not in ("prev", "next", "canonical"):
            self.fetched.add(given[FETCHED[tag]])


def test_no_link_of_the_site_is_broken(site: Path) -> None:
    pages = {path: Html(path) for path in site.rglob("*.html") if not path.is_relative_to(site / "src")}
    assert len(pages) > len(PAGES)  # and 404.html
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # shown at any address: its links begin with the site's own
            continue
        for link in page.links | page.fetched:
            if urlsplit(link).scheme:
                continue
            address = urlsplit(urljoin(f"http://site/{path.relative_to(site)}", link))
            target = site / unquote(address.path).lstrip("/")
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif address.fragment and unquote(address.fragment) not in pages[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert broken == []


def test_the_site_fetches_nothing_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        if path.is_relative_to(site / "src"):  # the dashboard's
            continue
        foreign = {url for url in Html(path).fetched if urlsplit(url).netloc}
        assert foreign == set(), path.relative_to(site)
        assert 'class="mermaid"' not in path.read_text(), "Mermaid comes from another host: draw it as text or an image"
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", path.read_text()), path.relative_to(site)


@pytest.mark.parametrize("link", ["missing.md", "api.md#missing"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    """Zensical looks at links to pages; for images and the like there are the tests above and below."""
    page = copied(tmp_path) / "docs" / "index.md"
    page.write_text(page.read_text() + f"\n[broken]({link})\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "does not exist" in done.stdout + done.stderr


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict | list):
            for value in entry.values() if isinstance(entry, dict) else entry:
                yield from files(value)

    named = list(files(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(named) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES)


# The Python API


@pytest.mark.parametrize("package", ["sparring", "sparring.client"])
def test_the_reference_has_every_public_name(site: Path, package: str) -> None:
    names = getattr(importlib.import_module(package), "__all__", [])
    wanted = {package, *(f"{package}.{name}" for name in names if not name.startswith("_"))}
    assert wanted - Html(site / "reference" / "index.html").anchors == set()


LAZY = """
__all__ = ["Thing", "make", "shelf"]

def __getattr__(name):
    import importlib
    return importlib.import_module("lazy.shelf") if name == "shelf" else getattr(__getattr__("shelf"), name)
"""
SHELF = """
class Thing:
    def size(self) -> int:
        "How large it is."

def make(what: str) -> Thing:
    "Makes a thing."

LIMIT = 3
"""


def lazy(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Builds the reference of a package that loads its names on demand."""
    (folder / "lazy").mkdir()
    (folder / "lazy" / "__init__.py").write_text(source)
    (folder / "lazy" / "shelf.py").write_text(SHELF)
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text("# Reference\n\n::: lazy\n")
    for name in ("src", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    settings = (ROOT / "zensical.toml").read_text()
    settings = re.sub(r"nav = \[\n.*?\n\]\n", "", settings, flags=re.S)
    settings = settings.replace('paths = ["src"]', 'paths = ["."]').replace(
        '["sparring", "sparring.client"]', '["lazy"]'
    )
    (folder / "zensical.toml").write_text(settings)
    return build(folder, PYTHONPATH=str(folder))


def test_the_reference_has_names_that_are_loaded_on_demand(tmp_path: Path) -> None:
    done = lazy(tmp_path, LAZY)
    assert done.returncode == 0, done.stdout + done.stderr
    page = tmp_path / "site" / "index.html"
    assert {"lazy.Thing", "lazy.Thing.size", "lazy.make"} <= Html(page).anchors
    assert "How large it is." in page.read_text()


@pytest.mark.parametrize(("name", "says"), [("LIMIT", "lazy.LIMIT is no class"), ("gone", "has no attribute 'gone'")])
def test_a_public_name_that_cannot_be_found_fails_the_build(tmp_path: Path, name: str, says: str) -> None:
    done = lazy(tmp_path, LAZY.replace('"Thing"', f'"{name}"'))
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


# The files as they are


def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())


def links(path: Path) -> Iterator[str]:
    for token in tokens(path):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs.get("href") or child.attrs["src"])


def anchors(path: Path) -> set[str]:
    """As GitHub makes them, and our site."""
    slug = slugify(case="lower")
    found: set[str] = set()
    all_tokens = tokens(path)
    for token, after in itertools.pairwise(all_tokens):
        if token.type == "heading_open":
            text = "".join(c.content for c in after.children or () if c.type in ("text", "code_inline"))
            name = first = slug(text, "-")
            count = 0
            while name in found:
                count += 1
                name = f"{first}-{count}"
            found.add(name)
    return found


def faults(path: Path) -> list[str]:
    """The relative links of a file that lead nowhere."""
    found = []
    for link in links(path):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_relative_to(ROOT) or not target.exists():
            found.append(f"{path.relative_to(ROOT)}: {link}: no such file")
        elif parts.fragment and target.suffix == ".md" and unquote(parts.fragment) not in anchors(target):
            found.append(f"{path.relative_to(ROOT)}: {link}: no such heading")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_the_files(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_link_to_what_the_site_has(path: Path) -> None:
    """The site holds docs/ and src/ alone: a page names other files as code, `tests/…`."""
    inside = [(path.parent / urlsplit(link).path).resolve() for link in links(path) if not urlsplit(link).scheme]
    has = (ROOT / "docs", ROOT / "src")
    assert [str(target) for target in inside if not any(target.is_relative_to(place) for place in has)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_are_there(path: Path) -> None:
    named = re.findall(r"\btests/[\w./-]*\w", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_guide_names_every_room() -> None:
    named = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert sorted(named) == sorted(path.parent.name for path in (ROOT / "src" / "sparring").glob("*/__init__.py"))


def test_links_that_lead_nowhere_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "there.py").touch()
    page = tmp_path / "page.md"
    page.write_text(
        "# A page — `with code`\n[1](src/there.py) [2](src/gone.py) [3](#a-page--with-code) [4](#gone) [5](../out.md)\n"
        "[6](http://127.0.0.1/gone) `[7](code.md)` ![8](gone.png)\n\n| a |\n|---|\n| [9](page.md#gone) |\n"
    )
    assert [fault.split(": ")[1] for fault in faults(page)] == [
        "src/gone.py",
        "#gone",
        "../out.md",
        "gone.png",
        "page.md#gone",
    ]
