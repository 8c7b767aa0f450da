"""A report once, as Markdown with its pictures beside it and as one HTML file that has them inside."""

import base64
import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sparring.files import write_whole

__all__ = ["Document"]

WIDTH = 100
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px;display:block;overflow-x:auto}
th,td{border-bottom:1px solid #ddd;padding:.3em .7em;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}
th{background:#f4f4f4}img{max-width:100%}
code{background:#f4f4f4;padding:.1em .3em}pre{background:#f4f4f4;padding:1em}"""
NUMBER = re.compile(r"[−–-]?[\d.,]*( [a-zA-Z%/]+)?|×[\d.]+")


class Heading(NamedTuple):
    text: str


class Text(NamedTuple):
    text: str


class Code(NamedTuple):
    text: str


class Table(NamedTuple):
    heads: list[str]
    rows: list[list[str]]


class Picture(NamedTuple):
    name: str
    words: str
    png: bytes


@dataclass
class Document:
    """Headings, paragraphs, code, tables and pictures, one after the other; paragraphs with `code` and **weight** in
    them."""

    title: str
    parts: list[Heading | Text | Code | Table | Picture] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(Heading(text))

    def text(self, text: str) -> None:
        self.parts.append(Text(text))

    def code(self, text: str) -> None:
        self.parts.append(Code(text))

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.parts.append(Table(list(heads), [list(row) for row in rows]))

    def picture(self, name: str, words: str, png: bytes) -> None:
        self.parts.append(Picture(name, words, png))

    def write(self, folder: Path, stem: str) -> list[Path]:
        """`stem.md`, `stem.html` and the pictures."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{stem}.md": self.markdown().encode(), f"{stem}.html": self.html().encode()}
        files |= {part.name: part.png for part in self.parts if isinstance(part, Picture)}
        for name, data in files.items():
            write_whole(folder / name, data, shared=True)
        return [folder / name for name in files]

    def markdown(self) -> str:
        lines = [f"# {self.title}\n"]
        for part in self.parts:
            match part:
                case Heading(text):
                    lines.append(f"## {text}\n")
                case Text(text):
                    lines.append(f"{textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)}\n")
                case Code(text):
                    lines.append(f"```sh\n{text}\n```\n")
                case Table(heads, rows):
                    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
                    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
                    lines.append("")
                case Picture(name, words, _):
                    lines.append(f"![{words}]({name})\n")
        return "\n".join(lines)

    def html(self) -> str:
        title = html.escape(self.title)
        lines = ["<!doctype html>", f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>']
        lines.append(f"<h1>{title}</h1>")
        for part in self.parts:
            match part:
                case Heading(text):
                    lines.append(f"<h2>{html.escape(text)}</h2>")
                case Text(text):
                    lines.append(f"<p>{_inline(text)}</p>")
                case Code(text):
                    lines.append(f"<pre>{html.escape(text)}</pre>")
                case Table(heads, rows):
                    lines.append("<table><tr>" + "".join(f"<th>{_inline(head)}</th>" for head in heads) + "</tr>")
                    lines += ["<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows]
                    lines.append("</table>")
                case Picture(_, words, png):
                    data = base64.b64encode(png).decode()
                    lines.append(f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"></p>')
        return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    bold = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html.escape(text))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", bold)


def _cell(text: str) -> str:
    number = ' class="n"' if NUMBER.fullmatch(text) else ""
    return f"<td{number}>{_inline(text)}</td>"
