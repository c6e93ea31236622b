"""``sglang-pp-mla diagnose``: a server's log in, cause and remedy out."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sglang_pp_mla.cli.saving import check_path, save
from sglang_pp_mla.cli.terminal import printable
from sglang_pp_mla.diagnose import Diagnosis, Readable, Reading
from sglang_pp_mla.follow import FollowError, follow
from sglang_pp_mla.signatures import BUILT_IN, Signature
from sglang_pp_mla.wiring.plugins import signatures_of_plugins

_COLOURS = {"healthy": "green", "certain": "red", "likely": "yellow", "unknown": "yellow"}


def diagnose(
    log: str | None = typer.Argument(
        None,
        metavar="[LOG]",
        help="A file, plain or gzip, or - for standard input, which is also read if LOG is left out.",
    ),
    follow_target: str | None = typer.Option(
        None,
        "--follow",
        metavar="TARGET",
        help="Watch a server start: a log FILE, unit:NAME of systemd, or the http(s)://HOST:PORT of the server.",
    ),
    timeout: float | None = typer.Option(
        None, "--timeout", min=0.0, metavar="SECONDS", help="With --follow: give up after so many seconds."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the reading as one JSON object."),
    save_to: Path | None = typer.Option(
        None, "--save", metavar="FILE", help="Also save the report, as FILE.svg or FILE.html."
    ),
) -> None:
    """Say what failed in a server's log, on which ranks, how sure that is, and what to type.

    \b
    sglang-pp-mla diagnose server.log
    journalctl -u sglang | sglang-pp-mla diagnose -
    kubectl logs POD | sglang-pp-mla diagnose
    docker compose logs | sglang-pp-mla diagnose --json
    sglang-pp-mla diagnose --follow unit:sglang --timeout 3600
    sglang-pp-mla diagnose --follow http://localhost:30000

    Logs of any size are read in little memory. Hosts and ranks may be mixed,
    and what journalctl, docker and kubectl put before a line is understood.
    Whatever a log holds, only printable text is shown.

    The reading is certain where the evidence leaves no other; likely where one
    more command would settle it, which is named; or unknown. docs/diagnose.md
    lists the failures known.

    --json: verdict, certainty, pp_ranks, release, evidence (line, text), remedy.

    --follow ends when the server is ready (0) or has failed (1, with the
    reading). A file may be rotated, or not be there yet. A URL is asked for
    /health_generate: 200 once a token has gone through all stages.

    Exit codes: 0 healthy, or no sign of a failure; 1 a failure, known or not,
    or --timeout was reached; 2 the call is wrong.
    """
    try:
        check_path(save_to)
    except ValueError as refusal:
        _wrong(str(refusal))
    if follow_target is not None and log is not None:
        _wrong("Give either LOG or --follow TARGET, not both.")
    if timeout is not None and follow_target is None:
        _wrong("--timeout is for --follow; leave it out, or name a TARGET to follow.")
    signatures = (*BUILT_IN, *signatures_of_plugins())
    try:
        reading = _followed(follow_target, timeout, signatures) if follow_target else _read(log, signatures)
    except (OSError, FollowError) as problem:
        _wrong(_sentence(problem))
    if as_json:
        sys.stdout.write(json.dumps(reading.as_json()) + "\n")
    else:
        Console(highlight=False).print(report(reading))
    if save_to is not None:
        _save(report(reading), save_to)
    raise typer.Exit(int(reading.problem))


def report(reading: Reading) -> Group:
    """The reading for people. Whatever comes from the log is plain text, never markup."""
    colour = _COLOURS.get(reading.verdict, _COLOURS.get(reading.certainty, "red"))
    title = Text(reading.verdict, style=f"bold {colour}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("certainty", Text(reading.certainty))
    if reading.pp_ranks:
        facts.add_row("ranks", Text(", ".join(f"PP{rank}" for rank in reading.pp_ranks)))
    if reading.release or reading.releases:
        facts.add_row("SGLang", Text(reading.release or " or ".join(reading.releases)))
    facts.add_row("what", Text(reading.meaning))
    if reading.remedy:
        facts.add_row("do", Text(reading.remedy, style="bold"))
    parts: list[Panel | Rule | Table] = [Panel(facts, title=title, title_align="left", border_style=colour)]
    if reading.evidence:
        lines = Table.grid(padding=(0, 2))
        lines.add_column(justify="right", style="cyan", no_wrap=True)
        lines.add_column(overflow="fold")
        for line in reading.evidence:
            lines.add_row(str(line.line), Text(line.text, style="dim"))
        parts += [Rule("evidence, by line of the log", align="left", style="dim"), lines]
    return Group(*parts)


def _read(log: str | None, signatures: tuple[Signature, ...]) -> Reading:
    diagnosis = Diagnosis(signatures)
    if log is None and sys.stdin.isatty():
        _wrong("There is no LOG: name a file, pipe a log in, or see --help.")
    if log in (None, "-"):
        _take_in(diagnosis, sys.stdin.buffer)
    else:
        with Path(str(log)).open("rb") as file:
            _take_in(diagnosis, file)
    return diagnosis.reading()


def _take_in(diagnosis: Diagnosis, stream: BinaryIO) -> None:
    # A buffered file of Python's can be looked into; standard input and open() give one.
    head = stream.peek(2)[:2]  # type: ignore[attr-defined]
    if head != b"\x1f\x8b":
        diagnosis.read(stream)
        return
    try:
        with gzip.open(stream) as unpacked:
            diagnosis.read(cast(Readable, unpacked))
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        typer.echo(printable(f"The log is damaged after what was read ({_sentence(problem)})"), err=True)


def _followed(target: str, timeout: float | None, signatures: tuple[Signature, ...]) -> Reading:
    with _progress(target) as on_step:
        diagnosis = Diagnosis(signatures, current_only=True, on_step=on_step)
        return follow(target, diagnosis, timeout)


class _Progress:
    """How far the stages are: a line that changes on a terminal, a line a step elsewhere. On standard error."""

    def __init__(self, target: str, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots", Text(f"waiting for {target}"))
        self.live = Live(self._spinner, console=console, transient=True) if console.is_terminal else None
        self._steps: dict[int | None, str] = {}

    def __call__(self, rank: int | None, step: str) -> None:
        if self._steps.get(rank) == step:
            return
        self._steps[rank] = step
        names = {rank: "server" if rank is None else f"PP{rank}" for rank in self._steps}
        if self.live is None:
            self._console.print(Text(f"{names[rank]}: {step}"))
        else:
            ranks = sorted(self._steps, key=lambda rank: -1 if rank is None else rank)
            self._spinner.update(text=Text(" · ".join(f"{names[rank]} {self._steps[rank]}" for rank in ranks)))


@contextmanager
def _progress(target: str) -> Iterator[_Progress]:
    progress = _Progress(target, Console(stderr=True, highlight=False))
    if progress.live is None:
        yield progress
    else:
        with progress.live:
            yield progress


def _save(shown: Group, file: Path) -> None:
    console = Console(record=True, width=110, highlight=False, file=io.StringIO())
    console.print(shown)
    try:
        save(console, file, "sglang-pp-mla diagnose")
    except ValueError as refusal:
        _wrong(str(refusal))


def _sentence(problem: Exception) -> str:
    text = (
        f"{problem.strerror}: {problem.filename}" if isinstance(problem, OSError) and problem.strerror else str(problem)
    )
    return f"{text}."


def _wrong(sentence: str) -> None:
    typer.echo(printable(sentence), err=True)
    raise typer.Exit(2)
