"""The project's documents as data: the commands in them, the code spans, the links. Reads files, runs nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/*.md", "patches/*.md", "upstream_repro/**/*.md", "examples/**/*.md")
DOCUMENTS = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
"""All of them. The changelog is of the past: its links are checked, its commands are not."""
OF_TODAY = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]

SHELL = ("", "sh", "bash", "shell", "console")
"""What a fence may call a block of commands; a block without a name is one, unless it shows what is printed."""
PRINTED = ('  File "', "[")
"""What blocks without a name begin with that show what is printed: a traceback, a line of a log."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<name>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
_SUBSTITUTED = re.compile(r"\$\(([^()]*)\)")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)|<(?:img|source)\b[^>]*?(?:src|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Command:
    """One simple command: ``words`` without assignments and redirections, ``reads`` what ``<`` names.

    ``$(tools/env …)`` and ``$(tools/overlay …)`` stand for a Python and have become ``python``; any other
    substitution has become ``…``; what is substituted is a command of its own. ``piped`` is whether it reads
    another's output, ``shown`` what a transcript (``$ command``) says it prints.
    """

    where: str
    words: tuple[str, ...]
    reads: tuple[str, ...] = ()
    piped: bool = False
    shown: str = ""

    @property
    def folder(self) -> Path:
        """Of the document."""
        return (ROOT / self.where.partition(":")[0]).parent

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Iterator[tuple[str, int, str]]:
    """Every fenced block: what its fence calls it, the line on which its text begins, its text."""
    text = path.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        inside = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.M)
        yield fence["name"], text.count("\n", 0, fence.start("text")) + 1, inside


def commands(path: Path) -> Iterator[Command]:
    """Every command in a document's blocks."""
    for name, number, text in blocks(path):
        if name in SHELL and (name or not text.startswith(PRINTED)):
            yield from commands_of(text, f"{name_of(path)}:{number}")


def commands_of(text: str, where: str) -> Iterator[Command]:
    """The commands of a block. In a transcript they stand behind ``$``, and what is printed follows."""
    document, _, first = where.partition(":")
    number, lines = int(first), text.splitlines()
    transcript = text.startswith("$ ")
    while lines:
        line, here = lines.pop(0), f"{document}:{number}"
        number += 1
        while line.endswith("\\"):
            line = line[:-1] + lines.pop(0)
            number += 1
        shown = []
        while transcript and lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
            number += 1
        yield from simple_commands(line.removeprefix("$ "), here, "\n".join(shown))


def simple_commands(line: str, where: str, shown: str = "") -> Iterator[Command]:
    """The commands joined by ``|``, ``&&``, ``;`` in a line, those substituted in it first."""
    while inner := _SUBSTITUTED.search(line):
        yield from simple_commands(inner[1], where)
        stands = "python" if inner[1].startswith(("tools/env ", "tools/overlay ")) and " lint" not in inner[1] else "…"
        line = line[: inner.start()] + stands + line[inner.end() :]
    line = re.sub(r"\s\d>&\d", "", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    reads: list[str] = []
    piped = False
    for token in [*lexer, ";"]:
        if not re.fullmatch(r"[|&;]+", token):
            words.append(token)
            continue
        for sign in ("<", ">", ">>"):
            while sign in words:
                at = words.index(sign)
                reads += [words[at + 1]] if sign == "<" else []
                del words[at : at + 2]
        while words and (words[0] in ("env", "sudo") or re.match(r"[A-Z_]+=", words[0])):
            words.pop(0)
        if words:
            yield Command(where, tuple(words), tuple(reads), piped, shown)
        words, reads, piped = [], [], token == "|"


def spans(path: Path) -> Iterator[tuple[str, str]]:
    """Code within the text: where, and what stands between the back-ticks, on one line."""
    text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), path.read_text(encoding="utf-8"))
    for found in re.finditer(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", text, re.S):
        if "\n\n" not in found[2]:
            code = " ".join(found[2].replace("\\|", "|").split())
            yield f"{name_of(path)}:{text.count(chr(10), 0, found.start()) + 1}", code


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Links and pictures: where, and what they lead to."""
    text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), path.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`", lambda code: code[0] if "](" not in code[0] else "", text)
    for found in _LINK.finditer(text):
        yield f"{name_of(path)}:{text.count(chr(10), 0, found.start()) + 1}", found[1] or found[2]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        seen = sum(each == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", each) is not None for each in found)
        found.append(f"{slug}-{seen}" if slug in found else slug)
    return set(found)


def is_sglang(words: tuple[str, ...]) -> bool:
    """Whether a command starts a server."""
    return words[:2] == ("sglang", "serve") or words[:3] == ("python", "-m", "sglang.launch_server")


def server_lines() -> dict[str, list[str]]:
    """The arguments of each command that starts a server, by the command with the place where it stands."""
    found = {}
    for path in OF_TODAY:
        for command in commands(path):
            if is_sglang(command.words):
                given = command.words[2 if command.words[0] == "sglang" else 3 :]
                found[str(command)] = ["0" if word == "N" else word for word in given]
    return found


def mentioned_flags() -> dict[str, list[str]]:
    """Flags that the text names alone (`--pp-size 8`) or of SGLang's commands, with the places where it does."""
    found: dict[str, list[str]] = {}
    for path in OF_TODAY:
        for where, code in spans(path):
            if code.startswith("--") or is_sglang(tuple(code.split())):
                for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
                    found.setdefault(flag, []).append(where)
    return found
