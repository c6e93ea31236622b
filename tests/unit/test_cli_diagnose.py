"""The verb as people use it: exit codes, JSON, reports, standard input, and a server that is being watched."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_pp_mla import follow as following
from sglang_pp_mla.cli import app
from sglang_pp_mla.diagnose import Diagnosis
from sglang_pp_mla.follow import FollowError, follow

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests/data/logs"
PROBE = LOGS / "pp8-index-error-0.5.11.log"
HEALTHY = LOGS / "healthy-pp4.log"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def piped(data: bytes, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "sglang_pp_mla.cli", "diagnose", *arguments]
    return subprocess.run(command, input=data, capture_output=True, cwd=ROOT, env={**os.environ, **(env or {})})


@pytest.mark.parametrize(
    ("log", "code"),
    [
        ("healthy-pp4", 0),
        ("pp8-index-error-0.5.11", 1),
        ("one-line-index-error", 1),  # an error of which it is not known what it is
        ("crash-after-ready-unknown", 1),
        ("starting", 0),  # nothing proven, and no sign of a failure
    ],
)
def test_exit_codes(log: str, code: int) -> None:
    assert run(LOGS / f"{log}.log").exit_code == code
    answer = run(LOGS / f"{log}.log", "--json")
    assert answer.exit_code == code
    assert list(json.loads(answer.stdout)) == ["verdict", "certainty", "pp_ranks", "release", "evidence", "remedy"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere/server.log"], "No such file or directory: /nowhere/server.log."),
        ([str(LOGS)], "Is a directory"),
        ([str(HEALTHY), "--save", "report.txt"], "end its name in .svg or .html"),
        ([str(HEALTHY), "--save", "/nowhere/report.svg"], "make /nowhere first"),
        ([str(HEALTHY), "--follow", "x"], "either LOG or --follow TARGET"),
        ([str(HEALTHY), "--timeout", "3"], "--timeout is for --follow"),
        (["--follow", "/nowhere/server.log"], "no file that could be followed"),
        (["--follow", "unit:"], "no unit's name"),
        (["--follow", "http://"], "names no host"),
        (["--follow", "http://[x"], "no URL that can be asked: Invalid IPv6 URL"),
        (["--follow", "http://localhost:port"], "no URL that can be asked: nonnumeric port: 'port'"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: list[str], sentence: str) -> None:
    answer = run(*arguments)
    assert answer.exit_code == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.output


def test_the_report_says_what_a_person_needs() -> None:
    report = run(PROBE).stdout
    for text in ("buffer-probe", "certain", "PP2, PP5, PP6, PP7", "0.5.11", "triton_pp", "silently", "228"):
        assert text in report


def test_standard_input_plain_gzip_and_left_out() -> None:
    data = PROBE.read_bytes()
    for given, arguments in ((data, ["-"]), (gzip.compress(data), ["-"]), (data, [])):
        done = piped(given, "--json", *arguments)
        assert (done.returncode, done.stderr) == (1, b"")
        assert json.loads(done.stdout)["pp_ranks"] == [2, 5, 6, 7]


def test_a_damaged_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = gzip.compress(PROBE.read_bytes() + os.urandom(100_000))
    (tmp_path / "log.gz").write_bytes(whole[:-50_000])
    answer = run(tmp_path / "log.gz", "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["verdict"] == "buffer-probe"
    assert "damaged" in answer.stderr


HOSTILE = (
    b"[2026-11-29 14:51:40 PP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    b"ValueError: [bold red]x[/bold red] \x1b[2J\x1b]0;owned\x07 \x9b2J \xff \xe2\x80\xae<script>alert()</script> [/]\n"
)


def test_nothing_of_a_log_reaches_the_terminal_or_a_report_but_text(tmp_path: Path) -> None:
    svg, html = tmp_path / "report.svg", tmp_path / "report.html"
    shown = piped(HOSTILE, "-", "--save", str(svg), env={"FORCE_COLOR": "1", "COLUMNS": "200"})
    assert shown.returncode == 1
    text = shown.stdout.decode()
    assert "[bold red]x[/bold red]" in text  # as it stands, not as a style
    for escape in ("\x1b[2J", "\x1b]0;", "\x07", "\u009b", "\u202e"):
        assert escape not in text
    as_json = piped(HOSTILE, "-", "--json", "--save", str(html))
    assert all(32 <= byte < 127 or byte == 10 for byte in as_json.stdout)
    for report in (svg, html):
        saved = report.read_text(encoding="utf-8")
        assert "unknown" in saved
        assert "<script>alert" not in saved
        assert not {"\x1b", "\x07", "\u009b", "\u202e"} & set(saved)


def test_a_binary_file_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "random.bin").write_bytes(os.urandom(2_000_000))
    answer = run(tmp_path / "random.bin", "--json")
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["verdict"] == "unknown"


def test_help_is_enough_on_its_own() -> None:
    shown = run("--help").stdout
    for text in ("--follow", "--timeout", "--json", "--save", "unit:", "journalctl", "Exit codes", "/health_generate"):
        assert text in shown


# Watching a server start


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "SETTLE_S", 0.3)
    monkeypatch.setattr(following, "POLL_S", 0.02)
    monkeypatch.setattr(following, "ASK_S", 0.02)


@contextmanager
def meanwhile(work: Any) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def slowly(path: Path, data: bytes) -> None:
    lines = data.splitlines(keepends=True)
    for at in range(0, len(lines), 1 + len(lines) // 10):
        with path.open("ab") as log:
            log.write(b"".join(lines[at : at + 1 + len(lines) // 10]))
        time.sleep(0.02)


@pytest.mark.parametrize(("log", "verdict", "code"), [(HEALTHY, "healthy", 0), (PROBE, "buffer-probe", 1)])
def test_a_file_that_is_being_written_and_was_not_there(tmp_path: Path, log: Path, verdict: str, code: int) -> None:
    path = tmp_path / "server.log"
    with meanwhile(lambda: (time.sleep(0.1), slowly(path, log.read_bytes()))):
        answer = run("--follow", path, "--timeout", 60, "--json")
    assert answer.exit_code == code
    reading = json.loads(answer.stdout)
    assert reading["verdict"] == verdict
    assert reading["pp_ranks"] == ([] if code == 0 else [2, 5, 6, 7])  # not the first to die alone
    assert "loading weights" in answer.stderr


def test_the_other_ranks_are_waited_for_after_the_first_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SETTLE_S", 2.0)
    path = tmp_path / "server.log"
    first, mark, others = PROBE.read_bytes().partition(b"[2026-11-29 14:38:36 PP7] Scheduler hit")
    path.write_bytes(first)

    heard = threading.Event()

    def others_die() -> None:
        heard.wait()
        time.sleep(0.5)
        with path.open("ab") as log:
            log.write(mark + others)

    with meanwhile(others_die):
        reading = follow(str(path), Diagnosis(on_step=lambda *_: heard.set()), 60)
    assert reading.pp_ranks == (2, 5, 6, 7)


@pytest.mark.parametrize("how", ["renamed", "cut"])
def test_a_file_that_is_rotated(tmp_path: Path, how: str) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"an older line\n" * 1000)

    def rotate() -> None:
        time.sleep(0.2)
        if how == "renamed":
            path.rename(tmp_path / "server.log.1")
            time.sleep(0.1)
        path.write_bytes(HEALTHY.read_bytes())

    with meanwhile(rotate):
        assert run("--follow", path, "--timeout", 60).exit_code == 0


def test_an_old_failure_before_a_good_start_is_not_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes((LOGS / "kv-cache-memory.log").read_bytes() + HEALTHY.read_bytes())
    assert run("--follow", path, "--timeout", 60).exit_code == 0
    path.write_bytes((LOGS / "kv-cache-memory.log").read_bytes() + (LOGS / "starting.log").read_bytes())
    answer = run("--follow", path, "--timeout", 0.5, "--json")
    assert (answer.exit_code, json.loads(answer.stdout)["verdict"]) == (1, "unknown")


def test_the_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes((LOGS / "starting.log").read_bytes())
    began = time.monotonic()
    answer = run("--follow", path, "--timeout", 0.3)
    assert answer.exit_code == 1
    assert "the time was up" in answer.stdout.replace("\n", " ")
    assert time.monotonic() - began < 10


def on_path(folder: Path, **scripts: str) -> str:
    """PATH with stand-ins first, for what this machine may lack."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


STARTED = "Mon 2026-11-30 05:00:00 UTC"


@pytest.mark.parametrize(
    ("systemctl", "since"),
    [(f"echo '{STARTED}'", f" --since {STARTED}"), ("echo", ""), ("echo no bus >&2; exit 1", "")],
)
def test_a_unit_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systemctl: str, since: str) -> None:
    log = LOGS / "wrapped-journal.log"
    script = f'test "$*" = "--follow --unit sglang --lines 1000 --no-pager{since}" && cat {log} && exec sleep 60'
    asked = 'test "$*" = "show --property InactiveExitTimestamp --value -- sglang" && '
    monkeypatch.setenv("PATH", on_path(tmp_path, journalctl=script, systemctl=asked + systemctl))
    answer = run("--follow", "unit:sglang", "--timeout", 60, "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["verdict"] == "buffer-probe"


def test_a_unit_whose_journal_ends_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", on_path(tmp_path, journalctl="echo 'No journal files' >&2; exit 1"))
    answer = run("--follow", "unit:sglang")
    assert (answer.exit_code, answer.stderr.strip()) == (2, "journalctl ended with 1: No journal files.")
    monkeypatch.setenv("PATH", on_path(tmp_path, journalctl=f"cat {LOGS / 'starting.log'}"))
    answer = run("--follow", "unit:sglang")
    assert answer.exit_code == 1
    assert "the log ended" in answer.stdout.replace("\n", " ")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(FollowError, match="journalctl is not on PATH"):
        follow("unit:sglang", Diagnosis(), None)


@contextmanager
def health(answers: list[int]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers with these codes in turn, then is gone."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(answers[len(asked) - 1])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)

    def serve() -> None:
        for _ in answers:
            server.handle_request()
        server.server_close()

    with meanwhile(serve):
        yield f"http://127.0.0.1:{server.server_port}", asked


def test_a_url_is_ready_once_a_token_went_through() -> None:
    with health([503, 503, 200]) as (url, asked):
        assert run("--follow", url, "--timeout", 60).exit_code == 0
    assert asked == ["/health_generate"] * 3


def test_a_path_of_the_users_own_is_asked() -> None:
    with health([200]) as (url, asked):
        assert run("--follow", f"{url}/ready", "--timeout", 60).exit_code == 0
    assert asked == ["/ready"]


def test_a_server_that_answered_and_is_gone_has_failed() -> None:
    with health([503]) as (url, _):
        answer = run("--follow", url, "--timeout", 60)
    assert answer.exit_code == 1
    assert "it has ended" in answer.stdout.replace("\n", " ")


def test_a_port_on_which_somebody_else_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with suppress(OSError):  # once the listener is shut
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(1000)
                        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        with meanwhile(greet):
            answer = run("--follow", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", 0.3)
            listener.shutdown(socket.SHUT_RDWR)
    assert answer.exit_code == 1
    assert "what answers there does not speak HTTP" in " ".join(answer.stdout.replace("│", " ").split())


def test_a_server_that_never_comes() -> None:
    answer = run("--follow", "http://127.0.0.1:9", "--timeout", 0.3, "--json")
    assert (answer.exit_code, json.loads(answer.stdout)["verdict"]) == (1, "unknown")
