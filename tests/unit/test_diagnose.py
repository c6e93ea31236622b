"""Logs in, readings out: each failure known has a log, and a log that lacks its key line is read otherwise."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pp_mla import diagnose as module
from sglang_pp_mla.diagnose import Diagnosis, Reading, diagnose
from sglang_pp_mla.frames import releases_with
from sglang_pp_mla.releases import RELEASES, Span
from sglang_pp_mla.signatures import BUILT_IN, Signature, says
from sglang_pp_mla.wiring.plugins import signatures_of_plugins

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests/data/logs"
PROBE = "in get_value_buffer"

# log, verdict, certainty, ranks, release, and a text without whose lines the reading must be another.
# The first seven are logs of real servers; the others are made, one or more a signature.
CASES: list[tuple[str, str, str, tuple[int, ...], str | None, str | None]] = [
    ("pp8-index-error-0.5.11", "buffer-probe", "certain", (2, 5, 6, 7), "0.5.11", PROBE),
    ("llama-pp4-index-error-0.5.11", "buffer-probe", "certain", (2, 3), "0.5.11", "IndexError: list"),
    ("truncated-journal", "buffer-probe", "likely", (), "0.5.11", "init_attention_backend"),
    ("one-line-index-error", "unknown", "unknown", (), None, None),
    ("first-token-crash-mla-256x64-0.5.23", "mla-geometry", "certain", (0,), "0.5.23", "Cannot make_shape"),
    ("import-error-kernels", "import-kernels", "certain", (), None, "ValueError: Either"),
    ("import-error-libcuda", "import-libcuda", "certain", (), None, "libcuda.so.1"),
    ("healthy-pp4", "healthy", "certain", (), None, "fired up"),
    ("healthy-rotated", "healthy", "likely", (), None, "Decode batch"),
    ("healthy-second-start", "healthy", "certain", (), None, "fired up"),
    ("healthy-user-error", "healthy", "certain", (), None, "fired up"),
    ("starting", "unknown", "unknown", (), None, None),
    ("crash-after-ready-unknown", "unknown", "unknown", (1,), None, None),
    ("buffer-probe-aiter", "buffer-probe", "certain", (2,), None, PROBE.replace("in ", "in _")),
    ("buffer-probe-frames-lost", "buffer-probe", "likely", (3,), None, "init_attention_backend"),
    ("buffer-probe-interleaved", "buffer-probe", "certain", (2, 3), None, PROBE),
    ("wrapped-docker-compose", "buffer-probe", "certain", (2,), "0.5.11", PROBE),
    ("wrapped-kubectl", "buffer-probe", "certain", (2,), "0.5.11", PROBE),
    ("wrapped-cri", "buffer-probe", "certain", (2,), "0.5.11", PROBE),
    ("wrapped-journal", "buffer-probe", "certain", (2,), "0.5.11", PROBE),
    ("wrapped-colours-crlf", "buffer-probe", "certain", (2,), "0.5.11", PROBE),
    ("named-release", "kv-cache-memory", "certain", (0,), "0.5.9", "Not enough memory"),
    ("pp-unsupported-model", "pp-unsupported-model", "certain", (0,), None, "Pipeline Parallel is not"),
    ("bad-partition", "bad-partition", "certain", (1,), None, "sum(partitions)=60"),
    ("pp-speculative", "pp-speculative", "certain", (), None, "not compatible with overlap"),
    ("pp-weights", "pp-weights", "likely", (1,), None, "KeyError: 'model.layers.4"),
    ("dsa-boundary", "dsa-boundary", "likely", (1,), None, "has no attribute 'unsqueeze'"),
    ("disaggregation", "disaggregation", "likely", (), None, "KVTransferError("),
    ("mla-geometry-gpu", "mla-geometry", "certain", (0,), None, "Cannot make_shape"),
    ("kv-splits", "kv-splits", "likely", (3,), None, "in init_cuda_graph_state"),
    ("shared-memory", "shared-memory", "certain", (0,), None, "out of resource"),
    ("compiler-missing", "compiler-missing", "certain", (0,), None, "Failed to find C compiler"),
    ("nvcc-missing", "nvcc-missing", "certain", (0,), None, "Could not find nvcc"),
    ("package-missing", "package-missing", "certain", (), None, "invalid choice"),
    ("missing-host", "missing-host", "certain", (4, 5, 6, 7), None, "has not joined"),
    ("missing-host-torch", "missing-host", "certain", (0,), None, "waiting for clients"),
    ("stage-without-attention", "stage-without-attention", "certain", (1,), None, "no full-attention layer"),
    ("mixed-value-heads", "mixed-value-heads", "certain", (1,), None, "has a value head of"),
    ("bad-setting", "bad-setting", "certain", (0,), None, "neither stock nor flat"),
    ("import-sgl-kernel", "import-sgl-kernel", "certain", (), None, "any common_ops library"),
    ("driver-too-old", "driver-too-old", "certain", (), None, "is too old"),
    ("no-gpu", "no-gpu", "certain", (), None, "platform plugin"),
    ("no-kernel-image", "no-kernel-image", "certain", (0,), None, "no kernel image"),
    ("too-few-gpus", "too-few-gpus", "certain", (4,), None, "invalid device ordinal"),
    ("heads-not-divisible", "heads-not-divisible", "certain", (), None, "64 is not divisible by 6"),
    ("nodes-not-divisible", "nodes-not-divisible", "certain", (), None, "number of nodes"),
    ("bad-argument", "bad-argument", "certain", (), None, "unrecognized arguments"),
    ("grpc-port", "grpc-port", "certain", (), None, "SGLANG_GRPC_PORT ("),
    ("port-in-use", "port-in-use", "certain", (), None, "already in use"),
    ("remote-code", "remote-code", "certain", (), None, "contains custom code"),
    ("unknown-architecture", "unknown-architecture", "certain", (), None, "does not recognize"),
    ("model-not-found", "model-not-found", "certain", (), None, "not a valid model identifier"),
    ("tokenizer-missing", "tokenizer-missing", "certain", (), None, "Can't load tokenizer"),
    ("checkpoint-damaged", "checkpoint-damaged", "certain", (1,), None, "SafetensorError"),
    ("kv-cache-memory", "kv-cache-memory", "certain", (1,), None, "Not enough memory"),
    ("cuda-graph-memory", "cuda-graph-memory", "certain", (1,), None, "Capture cuda graph failed"),
    ("out-of-memory-weights", "out-of-memory", "certain", (0,), None, "OutOfMemoryError"),
    ("out-of-memory", "out-of-memory", "certain", (0,), None, "OutOfMemoryError"),
    ("memory-unbalanced", "memory-unbalanced", "certain", (), None, "unbalanced"),
    ("dev-shm", "dev-shm", "certain", (1,), None, "NCCL WARN"),
    ("disk-full", "disk-full", "certain", (0,), None, "No space left"),
    ("oom-killed-kernel", "oom-killed", "certain", (), None, "Killed process"),
    ("oom-killed", "oom-killed", "likely", (), None, "exit code: -9"),
    ("pool-leak", "pool-leak", "certain", (0,), None, "leak detected"),
    ("gpu-fault", "gpu-fault", "certain", (), None, "NVRM: Xid"),
    ("illegal-memory-access", "illegal-memory-access", "certain", (0,), None, "illegal memory access"),
    ("device-assert", "device-assert", "certain", (0,), None, "device-side assert"),
    ("nccl-network", "nccl-network", "certain", (6,), None, "NCCL WARN"),
    ("nccl-init", "nccl-init", "likely", (1,), None, "NCCL error"),
    ("nccl-timeout", "nccl-timeout", "likely", (), None, "Watchdog caught"),
    ("weights-timeout", "weights-timeout", "likely", (0,), None, "could finish the model loading"),
    ("stuck-scheduler", "stuck-scheduler", "likely", (1, 2), None, "watchdog timeout ("),
    ("peer-died", "peer-died", "likely", (4,), None, "closed by peer"),
    ("crashed", "crashed", "certain", (), None, "exit code -11"),
]  # fmt: skip


def read(data: bytes, **options: Any) -> Reading:
    diagnosis = Diagnosis(**options)
    diagnosis.read(io.BytesIO(data))
    return diagnosis.reading()


@pytest.mark.parametrize(("log", "verdict", "certainty", "ranks", "release", "key"), CASES, ids=[c[0] for c in CASES])
def test_reads_the_log_and_not_one_that_lacks_the_key_line(
    log: str, verdict: str, certainty: str, ranks: tuple[int, ...], release: str | None, key: str | None
) -> None:
    data = (LOGS / f"{log}.log").read_bytes()
    reading = read(data)
    assert (reading.verdict, reading.certainty) == (verdict, certainty)
    assert reading.pp_ranks == ranks
    assert reading.release == release
    lines = [module._ANSI.sub("", line.decode()) for line in data.split(b"\n")]
    for evidence in reading.evidence:
        assert evidence.text[:80] in " ".join(lines[evidence.line - 1].split("\r")).strip()
    if key is None:
        return
    kept = [line for line in data.split(b"\n") if key.encode() not in line]
    assert len(kept) < len(lines), f"{key!r} is not in the log"
    without = read(b"\n".join(kept))
    assert (without.verdict, without.certainty) != (verdict, certainty)


def test_each_log_is_listed_and_each_signature_has_one() -> None:
    assert sorted(path.stem for path in LOGS.glob("*.log")) == sorted(case[0] for case in CASES)
    read_as = {read(path.read_bytes()).meaning for path in LOGS.glob("*.log")}
    filled = [re.compile(re.sub(r"\\\{\w+\\\}", r"\\S+", re.escape(each.meaning))) for each in BUILT_IN]
    for signature, meaning in zip(BUILT_IN, filled, strict=True):
        assert any(map(meaning.match, read_as)), signature.name


def test_says_what_the_first_incident_needs() -> None:
    reading = read((LOGS / "pp8-index-error-0.5.11.log").read_bytes())
    assert "PP1 did not fail" in reading.remedy
    assert "wraps silently" in reading.remedy
    assert "PP3 and PP4 said nothing" in reading.remedy
    assert "fixed upstream in 0.5.18" in reading.remedy
    assert "pip install .` in a clone of sglang-pp-mla" in reading.remedy


def test_a_likely_reading_names_the_command_that_settles_it() -> None:
    reading = read((LOGS / "truncated-journal.log").read_bytes())
    assert "`journalctl _PID=85711 -o cat | sglang-pp-mla diagnose -`" in reading.remedy
    for signature in BUILT_IN:
        assert bool(signature.settle) == (signature.certainty == "likely"), signature.name


def test_a_release_that_has_the_repair_makes_the_probe_no_likely_reading() -> None:
    fixed = RELEASES[-1]
    frames = json.loads((ROOT / "sglang_pp_mla/frames.json").read_text(encoding="utf-8"))
    line = frames["model_executor/model_runner.py"]["initialize"][fixed][0]
    log = [
        "[2026-11-29 14:51:40 PP2] Scheduler hit an exception: Traceback (most recent call last):",
        f'  File "/v/sglang/srt/model_executor/model_runner.py", line {line}, in initialize',
        "    self.init_attention_backends()",
        "IndexError: list index out of range",
    ]
    assert fixed in (diagnose(log).releases)
    assert diagnose(log).verdict == "unknown"
    assert diagnose([line for line in log if "File" not in line]).verdict == "buffer-probe"


def test_another_error_while_the_backend_is_built_is_not_the_probe() -> None:
    traceback = [
        "[2026-11-29 14:51:40 PP2] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/v/sglang/srt/model_executor/model_runner.py", line 1, in initialize',
        "    self.init_attention_backend()",
    ]
    assert diagnose(traceback).verdict == "buffer-probe"
    assert diagnose([*traceback, "RuntimeError: something else"]).verdict == "unknown"
    assert diagnose([*traceback[:1], "IndexError: list index out of range"]).verdict == "unknown"


def test_json_has_these_keys_and_no_others() -> None:
    for path in LOGS.glob("*.log"):
        answer = read(path.read_bytes()).as_json()
        assert list(answer) == ["verdict", "certainty", "pp_ranks", "release", "evidence", "remedy"]
        assert all(list(line) == ["line", "text"] for line in answer["evidence"])
        json.dumps(answer)


def test_ready_and_then_crashed_is_not_healthy() -> None:
    healthy = (LOGS / "healthy-pp4.log").read_bytes()
    assert read(healthy).verdict == "healthy"
    crash = b"[2026-11-29 14:59:00] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
    assert read(healthy + crash).verdict == "unknown"
    assert read(healthy + crash).problem
    probe = (LOGS / "pp8-index-error-0.5.11.log").read_bytes()
    assert read(healthy + probe).verdict == "buffer-probe"
    assert read(probe + healthy).verdict == "healthy"


def test_a_consequence_gives_way_to_a_cause_that_is_logged_later() -> None:
    peer, timeout, cause = (
        (LOGS / f"{name}.log").read_bytes().partition(b"ready to roll!\n")[2]
        for name in ("peer-died", "nccl-timeout", "illegal-memory-access")
    )
    assert read(peer + timeout).verdict == "nccl-timeout"
    assert read(peer + peer.replace(b"PP4", b"PP5") + timeout).verdict == "nccl-timeout"
    assert read(timeout + peer).verdict == "nccl-timeout"
    assert read(timeout + cause).verdict == "illegal-memory-access"


def test_a_consequence_of_an_unknown_cause_is_no_reading() -> None:
    unknown = (LOGS / "crash-after-ready-unknown.log").read_bytes()
    killed = b"[2026-11-29 14:51:43] Subprocess scheduler_0 (pid=1) crashed with exit code -9. Triggering SIGQUIT\n"
    assert read(killed).verdict == "oom-killed"
    assert read(unknown + killed).verdict == "unknown"
    assert read(unknown + (LOGS / "nccl-timeout.log").read_bytes().splitlines()[-1]).verdict == "unknown"


def test_a_traceback_that_follows_a_long_progress_bar_on_its_line() -> None:
    bars = b"".join(b"\rCapturing batches (bs=%d avail_mem=3.1 GB): 10%%|#         |" % bs for bs in range(3000))
    log = (
        (LOGS / "wrapped-kubectl.log").read_bytes().replace(b"[pod/sglang-0/main] 2026-06-24T12:05:21.085308861Z ", b"")
    )
    assert len(bars) > 2 * module.PIECE
    assert read(bars + b"\r" + log).pp_ranks == (2,)


def test_one_host_that_is_ready_does_not_forgive_another() -> None:
    ready = [b"node0-1  | " + line for line in (LOGS / "healthy-pp4.log").read_bytes().splitlines()]
    died = [b"node1-1  | " + line for line in (LOGS / "kv-cache-memory.log").read_bytes().splitlines()]
    assert read(b"\n".join(died + ready)).verdict == "kv-cache-memory"


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_ranks_whose_tracebacks_interleave_in_any_way(ranks: int, order: random.Random) -> None:
    traceback = [line.split("Z ", 1)[1] for line in (LOGS / "wrapped-kubectl.log").read_text().splitlines()]
    left = {rank: [line.replace("PP2]", f"PP{rank}]") for line in traceback] for rank in range(2, 2 + ranks)}
    mixed = []
    while left:
        rank = order.choice(sorted(left))
        mixed.append(left[rank].pop(0))
        if not left[rank]:
            del left[rank]
    reading = diagnose(mixed)
    assert (reading.verdict, reading.certainty, reading.release) == ("buffer-probe", "certain", "0.5.11")
    assert reading.pp_ranks == tuple(range(2, 2 + ranks))


@pytest.mark.parametrize("name", ["pp8-index-error-0.5.11", "healthy-pp4", "checkpoint-damaged"])
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_how_the_log_arrives_does_not_matter(name: str, sizes: list[int]) -> None:
    data = (LOGS / f"{name}.log").read_bytes()
    diagnosis = Diagnosis()
    for line in data.split(b"\n")[:-1]:
        diagnosis.feed(line)
    assert diagnosis.reading() == read(data)


def test_lines_that_differ_in_digits_alone_are_both_read() -> None:
    assert diagnose(["container exited with code 0", "container exited with code 137"]).verdict == "oom-killed"
    assert diagnose(["pip: sglang==0.5.11"] * 2).release == "0.5.11"


KEYS = sorted(set(Diagnosis()._keys()) - {"\x1b"})


@pytest.mark.parametrize("key", KEYS)
def test_no_line_with_a_key_is_passed_over(key: str) -> None:
    line = b"before " + key.encode() + (b"" if key[-1] in "\r\n" else b" after")
    assert Diagnosis()._interesting.search(line)


def test_each_pattern_matches_only_lines_with_its_keys() -> None:
    """Over all lines of all logs: a key that a match lacks would hide it."""
    lines = {line for path in LOGS.glob("*.log") for line in path.read_text(errors="replace").splitlines()}
    for signature in BUILT_IN:
        for need in signature.needs:
            for line in lines:
                assert (need.search(line) is None) == (need.compiled.search(line) is None), (signature.name, line)


# Hostile input

NASTY = [
    b"\x00\xff\xfe\x80binary\x00",
    b"\x1b[2J\x1b[1;1H\x1b]0;owned\x07IndexError: \x1b[31mlist\x1b[0m index out of range",
    b"\x1bP1$r0m\x1b\\ValueError: \x9b31m \xc2\x9b31m",
    "IndexError: \u202eevil\u202c \u200b\u2028 \ud800".encode("utf-8", "surrogatepass"),
    b"ValueError: [bold red]markup[/] [link=file:///etc/passwd]x[/link]",
    b"\r\r\r\rValueError: \r\n",
    b'{"log":"IndexError: list index out of range\\n"}',
]


LINES = [
    b"[2026-11-29 14:51:40 PP3] Scheduler hit an exception: Traceback (most recent call last):",
    b"node1 | May 25 21:41:38 node1 python[1]: ",
    b'  File "/sglang/srt/managers/scheduler.py", line 99999999999, in x',
    b"During handling of the above exception",
    b"server_args=",
    b"The server is fired up and ready to roll!",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(NASTY + LINES)), max_size=30))
def test_whatever_a_log_holds_the_reading_is_printable(lines: list[bytes]) -> None:
    reading = read(b"\n".join(lines))
    for line in reading.evidence:
        assert all(each.isprintable() or each == "\ufffd" for each in line.text)
    text = json.dumps(reading.as_json())
    assert text.isascii()
    assert text.isprintable()
    for line in (reading.remedy, reading.meaning, reading.release or ""):
        assert line.isprintable()


@pytest.mark.parametrize("unit", [b"x", b"NCCL WARN ", b"\r", b"IndexError: ", b"\x1b[", b"(PP1", b"sglang==0."])
def test_a_line_of_ten_megabytes_is_read_in_no_time(unit: bytes) -> None:
    began = time.process_time()
    reading = read(unit * (10_000_000 // len(unit)) + b"\nIndexError: list index out of range\n")
    assert time.process_time() - began < 5
    assert reading.verdict == "unknown"
    assert all(len(line.text) <= module.SHOWN for line in reading.evidence)


def test_what_is_remembered_does_not_grow_with_the_log() -> None:
    diagnosis = Diagnosis()
    letters = random.Random(1)
    for number in range(30_000):
        word = "".join(letters.choices("abcdefghij", k=12))
        diagnosis.feed(f"{word}-1  | [2026-11-29 14:51:40 PP{number % 5000}] nothing".encode())
        if not number % 10:
            diagnosis.feed(f"{word}-1  | [rank{number}]: IndexError: list index out of range".encode())
    assert len(diagnosis._known_lines) <= module.KNOWN
    assert len(diagnosis._hosts) <= module.HOSTS
    assert len(diagnosis._blocks) <= module.STREAMS
    assert len(diagnosis.reading().evidence) <= 10


def test_reads_ten_megabytes_of_a_usual_log_quickly() -> None:
    """The real figure, a gigabyte, is measured apart; this catches a prefilter that lets everything through."""
    line = b"[2026-11-29 14:51:%02d PP%d TP0] Decode batch, #running-req: 12, #token: %d, cuda graph: True\n"
    data = b"".join(line % (number % 60, number % 8, number) for number in range(100_000))
    taken = []

    class Counted(Diagnosis):
        def _take(self, piece: bytes) -> None:
            taken.append(piece)
            super()._take(piece)

    counted = Counted()
    counted.read(io.BytesIO(data))
    assert len(taken) < 10
    assert counted.reading().verdict == "healthy"


# Releases and others' signatures


def test_the_lines_of_a_traceback_name_the_release() -> None:
    frame = '  File "/v/sglang/srt/managers/scheduler.py", line 3918, in run_scheduler_process'
    assert releases_with(frame) == {"0.5.11"}
    assert releases_with(frame.replace("3918", "1")) == frozenset()
    assert releases_with(frame.replace("run_scheduler_process", "elsewhere")) is None
    assert releases_with("no frame") is None


def test_frames_that_fit_no_release_together_name_none() -> None:
    frame = 'File "/v/sglang/srt/managers/scheduler.py", line {}, in run_scheduler_process'.format
    log = ["Traceback (most recent call last):", frame(3918), frame(1), "ValueError: x"]
    assert diagnose(log).release is None


def test_another_package_adds_a_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "extra_failures.py").write_text(
        "from sglang_pp_mla.hookspecs import hookimpl\n"
        "from sglang_pp_mla.signatures import Signature, says\n"
        "@hookimpl\n"
        "def sglang_pp_mla_signatures():\n"
        "    return [Signature('coffee', 'No coffee.', 'make some', (says('out of coffee'),))]\n"
    )
    info = tmp_path / "extra_failures-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-failures\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang_pp_mla]\nextra = extra_failures\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (extra,) = signatures_of_plugins()
    assert diagnose(["out of coffee"], (*BUILT_IN, extra)).verdict == "coffee"
    assert diagnose(["out of coffee"]).verdict == "unknown"


def test_signatures_are_whole() -> None:
    for signature in BUILT_IN:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", signature.name)
        assert signature.needs
        assert signature.meaning.endswith(".")
        assert not signature.remedy.endswith(".")
        assert isinstance(signature.releases, Span)
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in signature.reports)
    assert len({signature.name for signature in BUILT_IN}) >= 20


def test_a_signature_is_as_good_as_its_keys() -> None:
    always = Signature("always", "It is.", "nothing", (says("needle"),))
    assert diagnose([b"hay needle hay"], [always]).verdict == "always"
    assert diagnose([b"hay"], [always]).verdict == "unknown"


def test_the_page_lists_what_is_known() -> None:
    """A row a signature, in order; the rows that are missing are what to add."""
    page = (ROOT / "docs/diagnose.md").read_text(encoding="utf-8").splitlines()
    rows = [
        f"| `{each.name}` | {each.certainty} | {cell(each.meaning)} | {cell(each.remedy)} | "
        f"{', '.join(map(link, each.reports))} |"
        for each in BUILT_IN
    ]
    assert [row for row in page if re.match(r"\| `[a-z-]+` \| (certain|likely) \|", row)] == rows


def cell(text: str) -> str:
    return re.sub(r"\{\w+\}", "…", text).replace("|", "\\|")


def link(report: str) -> str:
    repository, _, number = report.partition("#")
    return f"[{report.removeprefix('sgl-project/sglang')}](https://github.com/{repository}/issues/{number})"


def test_the_command_line_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_pp_mla.cli; print([each for each in ('torch', 'sglang') if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
