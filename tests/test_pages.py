"""The pages as people read them: lines are not too long, and the README leads to every page in two hops."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from wrapped_page import WIDEST, wrapped

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [
    ROOT / name
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "examples/README.md")
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
pages = pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without blocks of code."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def links(page: Path) -> Iterator[tuple[int, str]]:
    for number, line in prose(page):
        yield from ((number, link) for link in LINK.findall(line) if not re.match(r"[a-z]+:", link))


@pages
def test_lines_can_be_read(page: Path) -> None:
    for number, line in prose(page):
        bare = re.sub(r"!?\[[^\]]*\]\([^)]*\)|`[^`]+`|<!--.*-->", "", line).strip()  # these are not broken
        if len(line) > WIDEST and not line.startswith(("|", "#")) and re.search(r"\s", bare):
            pytest.fail(f"line {number} has {len(line)} characters: python tests/wrapped_page.py {page.name}")


@pages
def test_code_is_not_broken_over_lines(page: Path) -> None:
    """It would be found by nobody who searches for it; and the page ends with a whole line."""
    assert [number for number, line in prose(page) if line.count("`") % 2] == []
    assert page.read_text().endswith("\n")


@pages
def test_tables_are_whole(page: Path) -> None:
    """A table has a head, and as many cells in each row as in its head: else a forge shows it as text."""
    tables: list[list[tuple[int, str]]] = [[]]
    for number, line in prose(page):
        if line.startswith("|"):
            tables[-1].append((number, re.sub(r"`[^`]*`|\\\|", "", line)))
        else:
            tables.append([])
    for table in filter(None, tables):
        number, head = table[0]
        assert len(table) > 2, f"line {number}: a table without rows"
        assert re.fullmatch(r"\|([ :]*-+[ :]*\|)+", table[1][1]), f"line {number}: a table without a head"
        for number, row in table:
            assert row.count("|") == head.count("|"), f"line {number} has other cells than the table's head"


def test_what_the_readme_compares_is_filled_in() -> None:
    (table,) = re.findall(r"^\| \| Sparring \|.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    rows = [row.split("|")[1:-1] for row in table.splitlines()[2:]]
    assert len(rows) > 20
    assert [row[0] for row in rows if not all(map(str.strip, row))] == []


def test_wrapping_keeps_what_a_page_says() -> None:
    page = (
        "# A heading that may be as long as it likes to be, because nobody can break it in two, nor should anybody\n\n"
        "- An item with `code that is not broken` and [a link that is not broken](https://example.org/somewhere) and"
        " more\n  of it on the next line - with a dash.\n\n| a table | stays |\n\n```sh\nas  it   is\n```\n"
    )
    once = wrapped(page)
    assert once.split() == page.split()
    assert "```sh\nas  it   is\n```\n" in once
    assert "[a link that is not broken](https://example.org/somewhere)" in once
    assert once.splitlines()[3].startswith("  ")
    assert max(map(len, once.splitlines()[1:])) <= WIDEST
    assert wrapped(once) == once


def test_a_wrapped_line_does_not_begin_with_markup() -> None:
    once = wrapped("a" * 90 + " grows to 1234. and\n")
    assert once == "a" * 90 + " grows\nto 1234. and\n"


def test_every_page_is_two_hops_from_the_readme() -> None:
    def linked(page: Path) -> set[Path]:
        return {(page.parent / link.partition("#")[0]).resolve() for _, link in links(page)}

    first = linked(ROOT / "README.md")
    second = {target for page in first if page.suffix == ".md" for target in linked(page)}
    lost = [str(page.relative_to(ROOT)) for page in PAGES[1:] if page not in first | second and page.name != "index.md"]
    assert not lost
