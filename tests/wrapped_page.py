"""Wraps the prose of Markdown pages at 100 characters: `python tests/wrapped_page.py docs/PAGE.md …`.

Paragraphs and list items are filled; tables, blocks of code, headings and comments stay. Links and inline code are not
broken.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["WIDEST", "wrapped"]

WIDEST = 100
ITEM = re.compile(r"( *)([-*] |\d+\. )")
# A link (a picture, inline code, a comment) with what touches it, or a word.
TOKEN = re.compile(r"(?:!?\[[^\]]*\]\([^)]*\)|`[^`]+`|<!--.*?-->|\S)+")
MARKUP = re.compile(r"[-*+>|#]$|#+$|\d+\.$|```")  # at the beginning of a line it would mean something


def wrapped(page: str) -> str:
    out: list[str] = []
    paragraph: list[str] = []
    code = False

    def end() -> None:
        if paragraph:
            out.extend(_filled(paragraph))
            paragraph.clear()

    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            end()
            code = not code
            out.append(line)
        elif code or not line.strip() or re.match(r"\||#|<!--|!\[", line.lstrip()):
            end()
            out.append(line)
        elif ITEM.match(line):
            end()
            paragraph.append(line)
        else:
            paragraph.append(line)
    end()
    return "\n".join(out) + "\n"


def _filled(lines: list[str]) -> Iterator[str]:
    item = ITEM.match(lines[0])
    lead = item[0] if item else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    text = " ".join(line.strip() for line in [lines[0][len(lead) :], *lines[1:]])
    line: list[str] = []
    for word in TOKEN.findall(text):
        if line and len(lead) + len(" ".join([*line, word])) > WIDEST:
            kept = [line.pop()] if MARKUP.match(word) and len(line) > 1 else []  # it follows a word, as before
            yield lead + " ".join(line)
            lead, line = " " * len(lead), kept
        line.append(word)
    yield lead + " ".join(line)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrapped(path.read_text()))
