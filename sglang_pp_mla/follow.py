"""Watch a server that is starting, until it is ready or has failed: a log file, a systemd unit, or a URL's health."""

from __future__ import annotations

import os
import select
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import replace
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from sglang_pp_mla.diagnose import Diagnosis, Reading

POLL_S = 0.25
"""Seconds between two looks at a file that does not grow."""
ASK_S = 1.0
"""Seconds between two questions to a server."""
SETTLE_S = 3.0
"""Seconds for which the log must be silent after a failure: the other ranks' tracebacks follow the first."""
SETTLE_LONGEST_S = 15.0
"""Seconds after a failure at which the reading is made, silent or not."""
GONE = 3
"""Refused connections in a row that mean that a server which had answered is gone."""
ANSWER_S = 30.0
"""Seconds a server may take to generate the one token of its health check."""


class FollowError(Exception):
    """The target cannot be followed; one sentence."""


class Source(Protocol):
    """Where a log comes from. ``read`` waits for at most ``wait_s``; ``None`` means that no more will come."""

    def read(self, wait_s: float) -> bytes | None: ...


class File:
    """A log file, also one that is rotated (renamed, or cut) or not there yet."""

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.parent.is_dir():
            raise FollowError(f"{path} is no file that could be followed")
        self._path = path
        self._file: int | None = None

    def read(self, wait_s: float) -> bytes | None:
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                time.sleep(wait_s)
                return b""
        if piece := os.read(self._file, 1 << 20):
            return piece
        if self._moved():
            return b""
        time.sleep(wait_s)
        return b""

    def _moved(self) -> bool:
        """Whether the name now stands for another file, or this one was cut; then it is read from its start."""
        assert self._file is not None
        here = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False  # renamed, and the new one is not there yet
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            os.close(self._file)
            self._file = None
            return True
        if here.st_size < os.lseek(self._file, 0, os.SEEK_CUR):
            os.lseek(self._file, 0, os.SEEK_SET)
            return True
        return False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


class Unit:
    """The journal of a systemd unit's present run, from its last thousand lines on."""

    def __init__(self, name: str) -> None:
        if not name or name.startswith("-"):
            raise FollowError(f"{name!r} is no unit's name; write unit:NAME")
        command = ["journalctl", "--follow", "--unit", name, "--lines", "1000", "--no-pager", *_since_start(name)]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError:
            raise FollowError(
                "journalctl is not on PATH, so no unit can be followed here; follow its log file"
            ) from None

    def read(self, wait_s: float) -> bytes | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], wait_s)[0]:
            return b""
        if piece := os.read(self._process.stdout.fileno(), 1 << 16):
            return piece
        assert self._process.stderr is not None
        said = self._process.stderr.read(500).decode(errors="replace").strip()
        if self._process.wait():
            raise FollowError(f"journalctl ended with {self._process.returncode}: {said or 'it said nothing'}")
        return None

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def _since_start(unit: str) -> list[str]:
    """journalctl's ``--since`` for the run that systemd knows of: the end of the one before is not this one's.

    Empty where systemd does not tell, as in a container.
    """
    command = ["systemctl", "show", "--property", "InactiveExitTimestamp", "--value", "--", unit]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ["--since", said] if said else []


def follow(target: str, diagnosis: Diagnosis, timeout_s: float | None) -> Reading:
    """Watch ``target``, a file, ``unit:NAME`` or URL, until it is ready or has failed, and say which.

    ``timeout_s`` None waits for ever; once it is over the reading is a problem's. Raises :class:`FollowError`, or
    ``OSError`` where a file cannot be read.
    """
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    if target.lower().startswith(("http:", "https:")):
        return _follow_url(target, deadline)
    source = Unit(target.removeprefix("unit:")) if target.startswith("unit:") else File(Path(target))
    try:
        return _follow_log(source, diagnosis, deadline)
    finally:
        source.close()


def _follow_log(source: Source, diagnosis: Diagnosis, deadline: float) -> Reading:
    failed_at: float | None = None
    heard_at = time.monotonic()
    rest = b""
    while True:
        piece = source.read(min(POLL_S, max(0.0, deadline - time.monotonic())))
        now = time.monotonic()
        if piece:
            heard_at = now
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                diagnosis.feed(line)
            if len(rest) > 1 << 20:
                diagnosis.feed(rest)
                rest = b""
        # What is already there is read to its end first: an old failure may have been followed by a good start.
        caught_up = not piece
        if caught_up and diagnosis.ready:
            return diagnosis.reading()
        if diagnosis.failed:
            failed_at = failed_at or now
            if now - heard_at >= SETTLE_S or now - failed_at >= SETTLE_LONGEST_S:
                return diagnosis.reading()
        else:
            failed_at = None
        if piece is None or now >= deadline:
            if rest:
                diagnosis.feed(rest)
            reading = diagnosis.reading()
            if reading.problem or diagnosis.ready:
                return reading
            return _not_ready(reading, "the log ended" if piece is None else "the time was up")


def _follow_url(url: str, deadline: float) -> Reading:
    """Ask ``/health_generate``, or the path the URL has: it answers 200 once a token has gone through all stages."""
    try:
        parts = urlsplit(url)
    except ValueError as problem:
        raise FollowError(f"{url!r} is no URL that can be asked: {problem}") from None
    if not parts.hostname:
        raise FollowError(f"{url!r} names no host; write http://HOST:PORT")
    if parts.path in ("", "/"):
        url = f"{parts.scheme}://{parts.netloc}/health_generate"
    answered, refused, last = False, 0, "nothing answered yet"
    while True:
        left = deadline - time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=max(0.1, min(ANSWER_S, left))) as answer:
                return Reading("healthy", "certain", (), None, (), "", f"{url} answers {answer.status}.", False)
        except urllib.error.HTTPError as problem:
            answered, refused, last = True, 0, f"it answers {problem.code}"
        except (ValueError, InvalidURL) as problem:
            raise FollowError(f"{url!r} is no URL that can be asked: {problem}") from None
        except OSError as problem:  # URLError, timeouts and resets are among them
            reason = getattr(problem, "reason", problem)
            last = f"no answer ({reason})"
            refused = refused + 1 if isinstance(reason, ConnectionRefusedError | ConnectionResetError) else 0
        except HTTPException:
            refused, last = 0, "what answers there does not speak HTTP"
        unknown = Reading("unknown", "unknown", (), None, (), "`sglang-pp-mla diagnose` its log", "", True)
        if answered and refused >= GONE:
            return replace(unknown, meaning="The server had answered and does not any more: it has ended.")
        if time.monotonic() >= deadline:
            return replace(unknown, meaning=f"{url} was not ready when the time was up: {last}.")
        time.sleep(max(0.0, min(ASK_S, deadline - time.monotonic())))


def _not_ready(reading: Reading, why: str) -> Reading:
    return replace(
        reading,
        problem=True,
        meaning=f"The server was not ready when {why}, and the log shows no failure.",
        remedy="Wait longer (--timeout), or `sglang-pp-mla diagnose --follow http://HOST:PORT` if it logs elsewhere",
    )
