"""What a server's log says: lines in, a reading out. Pure, in memory that does not grow with the log.

Three things make it right where a search for "error" is not. A signature must find all its evidence in **one
traceback**, kept together by process and rank. **Ready forgives**: what came before a server was ready did not stop
it. **The first cause wins**: a consequence (a rank that lost its neighbour, a signal) is the reading only if nothing
else is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

from sglang_pp_mla.frames import releases_with
from sglang_pp_mla.releases import RELEASES
from sglang_pp_mla.signatures import BUILT_IN, PROBE_IN_TRITON, Kind, Signature

PIECE = 64 * 1024
"""Bytes of a line that are looked at; none that says anything is longer."""
WINDOW = 1000
"""Characters that a regex sees at once, so that a hostile line cannot make a search slow."""
SHOWN = 300
"""Characters of a line that a reading quotes."""
TOGETHER = 60
"""Lines after which what follows no longer belongs to a traceback."""
HOSTS = 64
STREAMS = 256
"""Hosts and processes whose state is kept; a log that names more is not a server's."""

READY = "The server is fired up and ready to roll!"
SERVING = "Decode batch"
_STEPS = (
    ("Init torch distributed begin", "joining the pipeline"),
    ("Init parallel begin", "joining the pipeline"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "weights loaded"),
    ("KV Cache is allocated", "cache allocated"),
    ("Capture cuda graph begin", "capturing CUDA graphs"),
    ("max_total_num_tokens=", "waiting for requests"),
)
_STARTS = ("server_args=", "systemd[1]: Started ")
_CHAINS = ("During handling of the above exception", "was the direct cause of the following exception")
_HIT = "Scheduler hit an exception"
_DEATHS = (
    _HIT,
    "Received sigquit from a child process",
    "SIGQUIT received.",
    "scheduler died during initialization",
    "scheduler is dead",
    "Initialization failed.",
    "crashed with exit code",
    "Main process exited, code=",
)
_RELEASE = re.compile(r"\bsglang(?:==|:v|: )(\d+\.\d+\.\d+(?:\.post\d+)?)(?![\w.])")
_RELEASE_KEYS = ("sglang==", "sglang:v", "sglang: ")
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = 'File "'
_GENERIC = (_TRACEBACK, _FRAME, "Error:", "Error\r", "Error\n", "Exception:", "Exception\r", "Exception\n", "\x1b")
_REQUESTS = ("Receive: ", "Finish: ")
"""Records that hold what users sent, which may be anything."""

_DIGITS = b"0123456789"
"""Lines that differ in digits alone are looked at once: no key has any."""
KNOWN = 20_000
"""Lines without their digits that are remembered as saying nothing."""
_COMMON = (
    b" \neatoi=nr,s:lhd'\"cmu_pgf/.-ywb#v()[]PTk+OINSREDxAjzqC"  # from the most common in a log on; others are rarer
)
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~]?)")
# Controls, and what turns or hides text around it: bidirectional marks, zero widths, line separators, surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_WRAPPERS = re.compile(
    r"(?P<compose>[\w][\w.-]*) +\| |\[(?P<pod>pod/[^\]]+)\] |\[(?P<rank>rank\d+)\]: ?"
    r"|\((?P<ray>\w+ pid=\d+[^)]*)\) "
    r"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)) "
    r"(?P<unit>[\w.-]+ [^\s\[\]:]+)(?:\[(?P<pid>\d+)\])?: "
    r"|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] ?)?"
)
_RECORD = re.compile(r"\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?P<tags>[^\]]{0,60})\] ?")
_PP = re.compile(r"\bPP(\d{1,4})\b")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|OutOfResources)(?::|$)")


class Readable(Protocol):
    """A binary file, or what reads like one."""

    def readline(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Evidence:
    """A line of the log: its number, from 1, and its text, cleaned and shortened."""

    line: int
    text: str


@dataclass(frozen=True)
class Reading:
    """What a log says. ``as_json`` is what others may rely on; the rest is for people.

    ``problem``: the log shows a failure, whether or not it is known which.
    """

    verdict: str
    certainty: str
    pp_ranks: tuple[int, ...]
    release: str | None
    evidence: tuple[Evidence, ...]
    remedy: str
    meaning: str
    problem: bool
    releases: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "certainty": self.certainty,
            "pp_ranks": list(self.pp_ranks),
            "release": self.release,
            "evidence": [{"line": each.line, "text": each.text} for each in self.evidence],
            "remedy": self.remedy,
        }


@dataclass
class _Finding:
    """A signature that has found its evidence, in the first traceback that had all of it."""

    signature: Signature
    order: tuple[int, int, int, int]
    evidence: list[Evidence]
    groups: dict[str, str]
    ranks: set[int]
    block: _Block
    pid: str | None


@dataclass
class _Block:
    """A traceback with its message, or a record of the log; of several ranks where theirs are interleaved."""

    start: int
    last: int
    ranks: set[int]
    headers: int
    head: Evidence | None = None
    raised: int = 0
    chained: bool = False
    deaths: list[int] = field(default_factory=list)
    seen: dict[int, dict[int, tuple[Evidence, dict[str, str]]]] = field(default_factory=dict)
    findings: list[_Finding] = field(default_factory=list)


@dataclass
class _Host:
    """What one server's log has said so far."""

    run: int = 0
    ready: Evidence | None = None
    findings: dict[int, _Finding] = field(default_factory=dict)
    deaths: list[Evidence] = field(default_factory=list)
    dead_ranks: set[int] = field(default_factory=set)
    unexplained: set[int] = field(default_factory=set)
    raised: list[Evidence] = field(default_factory=list)

    def forget(self) -> None:
        self.findings.clear()
        self.deaths.clear()
        self.dead_ranks.clear()
        self.unexplained.clear()
        self.raised.clear()


class Diagnosis:
    """Reads a log line by line; :meth:`reading` says what it has said so far.

    ``current_only`` forgets a run where the next begins, for a log that is being followed.
    ``on_step`` is called with ``(rank or None, what)`` as stages come along.
    """

    def __init__(
        self,
        signatures: Sequence[Signature] = BUILT_IN,
        *,
        current_only: bool = False,
        on_step: Callable[[int | None, str], None] | None = None,
    ) -> None:
        self._signatures = tuple(signatures)
        self._current_only = current_only
        self._on_step = on_step
        self._number = 0
        self._continued = False
        self._serving: Evidence | None = None
        self._hosts: dict[str, _Host] = {}
        self._blocks: dict[tuple[str, str], _Block] = {}
        self._seen_ranks: set[int] = set()
        self._releases: frozenset[str] | None = None
        self._named: str | None = None
        self._interesting = _any_of(frozenset(self._keys()))
        needs = [
            (index, number, need)
            for index, signature in enumerate(self._signatures)
            for number, need in enumerate(signature.needs)
        ]
        self._frames = [each for each in needs if each[2].keys == (_FRAME,)]
        self._texts = [each for each in needs if each[2].keys != (_FRAME,)]
        self._text = re.compile("|".join(re.escape(key) for *_, need in self._texts for key in need.keys))
        self._known_lines: set[bytes] = set()

    def _keys(self) -> Iterator[str]:
        if self._serving is None:
            yield SERVING
        yield from (READY, *_GENERIC, *_CHAINS, *_STARTS, *_DEATHS, *_RELEASE_KEYS)
        yield from (text for text, _ in _STEPS)
        for signature in self._signatures:
            for need in signature.needs:
                yield from need.keys

    def read(self, log: Readable) -> None:
        """Take in all lines of a log."""
        take, readline, known = self._take, log.readline, self._known_lines
        while piece := readline(PIECE):
            if self._continued:
                # More of a long line. Progress bars come back to its start, so another may begin in it.
                self._continued = piece[-1] != 10
                _, _, piece = piece.partition(b"\r")
            else:
                self._number += 1
                self._continued = piece[-1] != 10
            shape = piece.translate(None, _DIGITS)
            if shape in known:
                continue
            if self._interesting.search(piece):
                take(piece)
            elif len(shape) < SHOWN:
                if len(known) >= KNOWN:
                    known.clear()
                known.add(shape)

    def feed(self, line: bytes) -> None:
        """Take in one line, with or without its end."""
        self.read(_One(line if line.endswith(b"\n") else line + b"\n"))

    @property
    def ready(self) -> bool:
        """Whether a server is ready and nothing has failed since."""
        return any(host.ready for host in self._hosts.values()) and not self.failed

    @property
    def failed(self) -> bool:
        """Whether something has ended or is known to be fatal."""
        return any(host.deaths for host in self._hosts.values()) or any(True for _ in self._eligible())

    # Lines

    def _take(self, piece: bytes) -> None:
        for part in re.split(rb"[\r\n]+", piece):  # each progress bar by itself
            if not part:
                continue
            if b"\x1b" in part:
                part = _ANSI.sub("", part.decode("utf-8", "replace")).encode()
            if len(part) <= WINDOW:
                if self._interesting.search(part + b"\n"):
                    self._line(_clean(part))
                continue
            for at in range(0, len(part), WINDOW - SHOWN):
                window = part[at : at + WINDOW]
                if self._interesting.search(window):
                    self._line(_clean(window))

    def _line(self, text: str) -> None:
        line = Evidence(self._number, _shown(text))
        body, host_name, stream, pid = _unwrap(text)
        record = _RECORD.search(body, 0, 120)
        rank = None
        if record:
            named = _PP.search(record["tags"])
            rank = int(named[1]) if named else None
            body = body[record.end() :]
            if body.startswith(_REQUESTS):
                return
        host = self._hosts.get(host_name)
        if host is None:
            if len(self._hosts) >= HOSTS:
                return
            host = self._hosts[host_name] = _Host()
        if rank is not None:
            self._seen_ranks.add(rank)
        self._note(host, line, body, rank)
        block = self._block(host_name, stream, line, body, rank, record is not None)
        if _HIT in body and not block.findings and len(host.unexplained) < STREAMS:
            host.unexplained.add(line.line)
            block.deaths.append(line.line)
        self._match(host, block, line, body, pid)

    def _note(self, host: _Host, line: Evidence, body: str, rank: int | None) -> None:
        """What a line says of the release, the stages' progress, a start, an end or a death."""
        if any(key in body for key in _RELEASE_KEYS) and (release := _RELEASE.search(body)):
            self._named = release[1]
        if 'File "' in body and (possible := releases_with(body)) is not None:
            self._releases = possible if self._releases is None else self._releases & possible
        if READY in body:
            host.forget()
            host.ready = line
            self._step(None, "ready")
            return
        if SERVING in body and self._serving is None:
            self._serving = line
            self._interesting = _any_of(frozenset(self._keys()))  # there will be many more of these
        for text, step in _STEPS:
            if text in body:
                self._step(rank, step)
        if any(text in line.text or text in body for text in _STARTS):
            if host.findings or host.deaths:
                host.run += 1
            if self._current_only:
                host.forget()
                host.ready = None
        if any(text in body for text in _DEATHS):
            if len(host.deaths) < 5:
                host.deaths.append(line)
            if rank is not None:
                host.dead_ranks.add(rank)

    def _step(self, rank: int | None, step: str) -> None:
        if self._on_step is not None:
            self._on_step(rank, step)

    # Tracebacks

    def _block(self, host: str, stream: str, line: Evidence, body: str, rank: int | None, record: bool) -> _Block:
        """The traceback or record that a line belongs to."""
        key = (host, stream)
        block = self._blocks.get(key)
        if block is not None and line.line - block.last > TOGETHER:
            block = None
        header = _TRACEBACK in body
        ranks = set() if rank is None else {rank}
        if record:
            unfinished = block is not None and block.raised < block.headers
            if block is None or not unfinished:
                return self._begin(key, _Block(line.line, line.line, ranks, int(header), line if header else None))
            if not header:  # another rank speaks between the lines of a traceback
                return _Block(line.line, line.line, ranks, 0)
            block.headers += 1
            block.ranks |= ranks
            for finding in block.findings:
                finding.ranks |= ranks
        elif header:
            if block is not None and block.chained:
                block.raised = max(0, block.raised - 1)
                block.chained = False
            elif block is None or block.raised >= block.headers:
                return self._begin(key, _Block(line.line, line.line, set(), 1, line))
        else:
            raises = _RAISED.match(body) is not None
            begins = raises or body.lstrip().startswith('File "')
            if begins and block is not None and 0 < block.headers <= block.raised and not block.chained:
                block = None
            if block is None:
                block = self._begin(key, _Block(line.line, line.line, set(), 1))
            if any(text in body for text in _CHAINS):
                block.chained = True
            if raises:
                block.raised += 1
                self._raised(host, line)
        block.last = line.line
        return block

    def _begin(self, key: tuple[str, str], block: _Block) -> _Block:
        if key not in self._blocks and len(self._blocks) >= STREAMS:
            self._blocks.pop(next(iter(self._blocks)))
        self._blocks[key] = block
        return block

    def _raised(self, host: str, line: Evidence) -> None:
        raised = self._hosts[host].raised
        if len(raised) < 5:
            raised.append(line)

    def _match(self, host: _Host, block: _Block, line: Evidence, body: str, pid: str | None) -> None:
        """What a line adds to the evidence of each signature."""
        needs = self._frames if _FRAME in body else []
        if self._text.search(body):
            needs = needs + self._texts
        for index, number, need in needs:
            found = need.search(body)
            if found is None or number in block.seen.get(index, ()):
                continue
            seen = block.seen.setdefault(index, {})
            seen[number] = (line, {name: text for name, text in found.groupdict().items() if text is not None})
            if len(seen) == len(self._signatures[index].needs):
                self._find(host, block, index, pid)

    def _find(self, host: _Host, block: _Block, index: int, pid: str | None) -> None:
        """A signature has all its evidence in a block; the first block that had it is what a reading shows."""
        host.unexplained.difference_update(block.deaths)
        finding = host.findings.get(index)
        if finding is None:
            signature = self._signatures[index]
            seen = block.seen[index].values()
            lines = {each.line: each for each, _ in seen}
            if block.head is not None:
                lines.setdefault(block.head.line, block.head)
            finding = host.findings[index] = _Finding(
                signature,
                (host.run, signature.kind, block.start, index),
                [lines[number] for number in sorted(lines)],
                {name: text for _, groups in seen for name, text in groups.items()},
                set(),
                block,
                pid,
            )
        if named := finding.groups.get("ranks"):
            finding.ranks |= {int(rank) for rank in _PP.findall(named)}
            return
        finding.ranks |= block.ranks
        block.findings.append(finding)

    # The reading

    def _eligible(self) -> Iterator[_Finding]:
        possible = self._release()[1]
        for host in self._hosts.values():
            for finding in host.findings.values():
                signature = finding.signature
                if signature.unfinished and finding.block.raised >= finding.block.headers:
                    continue
                elsewhere = possible and not any(release in signature.releases for release in possible)
                if elsewhere and signature.certainty != "certain":
                    continue
                if host.ready is None or host.deaths or signature.outlives_ready:
                    yield finding

    def reading(self) -> Reading:
        """What the lines so far say."""
        first = min(self._eligible(), key=lambda finding: finding.order, default=None)
        if first is not None and not self._follows_the_unknown(first):
            return self._known(first)
        hosts = list(self._hosts.values())
        deaths = [line for host in hosts for line in host.deaths]
        raised = [line for host in hosts if host.ready is None or host.deaths for line in host.raised]
        ready = next((host.ready for host in hosts if host.ready), None)
        if deaths or (raised and ready is None):
            return self._unknown(deaths, raised)
        release, releases = self._release()
        if ready is None and self._serving is None:
            return Reading(
                "unknown",
                "unknown",
                (),
                release,
                (),
                "Give the whole log from the server's start, at SGLang's default --log-level; for one that is still "
                "starting, `sglang-pp-mla diagnose --follow LOG`",
                "The log shows neither a failure nor a server that is ready.",
                False,
                releases,
            )
        shown = ready or self._serving
        return Reading(
            "healthy",
            "certain" if ready else "likely",
            (),
            release,
            (shown,) if shown else (),
            "" if ready else "`curl http://HOST:PORT/health_generate` answers 200 once the server is ready",
            "The server is ready and nothing failed afterwards."
            if ready
            else "The server decodes and nothing failed; the log does not reach back to its start.",
            False,
            releases,
        )

    def _follows_the_unknown(self, finding: _Finding) -> bool:
        """Whether a scheduler died before this consequence, of a cause that is not known."""
        died = min((line for host in self._hosts.values() for line in host.unexplained), default=finding.block.start)
        return finding.signature.kind is not Kind.CAUSE and died < finding.block.start

    def _known(self, finding: _Finding) -> Reading:
        signature = finding.signature
        release, releases = self._release()
        whole_log = f"journalctl _PID={finding.pid} -o cat" if finding.pid else "cat WHOLE_LOG"
        groups = {**finding.groups, "whole_log": whole_log}
        remedy = _filled(signature.remedy, groups)
        if signature.settle:
            remedy += f". To be certain: {_filled(signature.settle, groups)}"
        remedy = ". ".join((remedy, *self._remarks(finding, release)))
        return Reading(
            signature.name,
            signature.certainty,
            tuple(sorted(finding.ranks)),
            release,
            tuple(finding.evidence),
            remedy,
            _filled(signature.meaning, groups),
            True,
            releases,
        )

    def _remarks(self, finding: _Finding, release: str | None) -> Iterator[str]:
        """What more there is to say of this failure in this log."""
        signature = finding.signature
        if signature.name != "buffer-probe":
            return
        if release is not None and release not in PROBE_IN_TRITON:
            yield f"SGLang {release} has the repair for Triton, so here another backend asks"
        silent = sorted(self._seen_ranks - finding.ranks - {0})
        if not finding.ranks or max(finding.ranks) < 2:
            return
        if 1 in silent:
            yield (
                "PP1 did not fail: its index wraps silently onto the buffer of another layer, as on each stage that "
                "begins at or below its own number of layers"
            )
        if others := [rank for rank in silent if rank > 1]:
            yield f"{_names(others)} said nothing before the server was ended"

    def _unknown(self, deaths: list[Evidence], raised: list[Evidence]) -> Reading:
        release, releases = self._release()
        lines = {line.line: line for line in (*deaths[:3], *raised[:3])}
        ranks = {rank for host in self._hosts.values() for rank in host.dead_ranks}
        if deaths:
            meaning = "The server failed in a way that is not among those known."
            remedy = "Search https://github.com/sgl-project/sglang/issues for the last line of the first traceback"
        else:
            meaning = "There is an error, but not enough around it to say which failure it belongs to."
            remedy = "Give the whole log from the server's start, at least the traceback above this error"
        return Reading(
            "unknown",
            "unknown",
            tuple(sorted(ranks)),
            release,
            tuple(lines[number] for number in sorted(lines)),
            remedy,
            meaning,
            True,
            releases,
        )

    def _release(self) -> tuple[str | None, tuple[str, ...]]:
        """The release, and those that the line numbers allow where they do not tell them apart."""
        possible = tuple(release for release in RELEASES if release in (self._releases or ()))
        if len(possible) == 1:
            return possible[0], possible
        if self._named is not None and (not possible or self._named in possible):
            return self._named, (self._named,)
        return None, possible


class _One:
    """One line as a file."""

    def __init__(self, line: bytes) -> None:
        self._rest = line

    def readline(self, size: int, /) -> bytes:
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece


def diagnose(lines: Iterable[bytes | str], signatures: Sequence[Signature] = BUILT_IN) -> Reading:
    """The reading of a log given as lines."""
    diagnosis = Diagnosis(signatures)
    for line in lines:
        diagnosis.feed(line.encode("utf-8", "surrogateescape") if isinstance(line, str) else line)
    return diagnosis.reading()


@lru_cache(maxsize=8)
def _any_of(keys: frozenset[str]) -> re.Pattern[bytes]:
    """A regex that finds every line which holds one of the texts, and few others, as fast as ``re`` can.

    It looks for the end of each text from its least common character on, without digits (see :data:`_DIGITS`),
    and has one branch a first character.
    """
    ends = set()
    for key in keys:
        text = max(re.split(r"\d+", key), key=len).encode()
        start = max(range(max(1, len(text) - 10)), key=lambda at: _COMMON.find(text[at : at + 1]) % 256)
        ends.add(text[start:])
    branches = [
        re.escape(first) + b"(?:" + b"|".join(re.escape(end[1:]) for end in group) + b")"
        for first, group in groupby(sorted(ends), key=lambda end: end[:1])
    ]
    return re.compile(b"|".join(branches))


def _clean(part: bytes) -> str:
    """A line as text that no terminal, browser or reader can be harmed by: printable, and tabs as spaces."""
    return _CONTROLS.sub("\ufffd", part.decode("utf-8", "replace").rstrip("\r\n").replace("\t", " "))


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _unwrap(text: str) -> tuple[str, str, str, str | None]:
    """A line without what Docker, Kubernetes, systemd, Ray or PyTorch put before it; its host, process and pid."""
    at, hosts, streams, pid = 0, [], [], None
    for _ in range(4):
        wrapper = _WRAPPERS.match(text, at)
        if wrapper is None or wrapper.end() == at:
            break
        at = wrapper.end()
        hosts += [each for each in (wrapper["compose"], wrapper["pod"], wrapper["unit"]) if each]
        streams += [each for each in (wrapper["rank"], wrapper["ray"], wrapper["pid"]) if each]
        pid = wrapper["pid"] or pid
    return text[at:], "/".join(hosts), "/".join(streams), pid


def _filled(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: groups.get(name[1], name[0]), text)


def _names(ranks: Sequence[int]) -> str:
    names = [f"PP{rank}" for rank in ranks]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
