"""The parts of a rehearsal that need no engine: processes, environment, log reading, bad calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_pp_mla.rehearsal import (
    KERNEL_LIBRARY,
    Installation,
    RehearsalError,
    engine,
    find_sglang,
    rehearsal_environment,
    run_engine,
    shrink,
)
from sglang_pp_mla.rehearsal.environment import cpu_sets, wants_cpu_sets
from sglang_pp_mla.rehearsal.hosts import _ASK
from sglang_pp_mla.rehearsal.processes import KeptProcess, marked
from sglang_pp_mla.rehearsal.progress import find_death, stage_step
from sglang_pp_mla.rehearsal.runner import _healthy
from sglang_pp_mla.rehearsal.tokenizer import words

# Leaves a child in the same session, one that turned daemon, and stays itself.
BROOD = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.Popen(["sleep", "600"], env={})
        time.sleep(600)
    os._exit(0)
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


def wait_until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def below(pid: int) -> list[int]:
    import psutil

    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def gone(pids: list[int]) -> bool:
    import psutil

    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            pass
    return True


def test_stopping_leaves_nothing_not_even_what_shed_its_environment() -> None:
    kept = KeptProcess([sys.executable, "-c", BROOD, "600"], env=dict(os.environ))
    wait_until(lambda: "ready" in kept.log)
    wait_until(lambda: len(kept.pids()) >= 4)
    pids = kept.pids() + below(kept.pids()[0])
    kept.stop()
    assert marked(kept.identity) == []
    assert gone(pids)


def test_a_command_that_ends_takes_all_with_it() -> None:
    kept = KeptProcess([sys.executable, "-c", BROOD, "1"], env=dict(os.environ))
    assert kept.wait(30) == 0
    assert marked(kept.identity) == []
    kept.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_caller_that_dies_leaves_nothing(number: int, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, signal, sys, time
            from sglang_pp_mla.rehearsal.processes import KeptProcess
            # A shell's background jobs, and so what they start, ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            kept = KeptProcess([sys.executable, "-c", {BROOD!r}, "600"], env=dict(os.environ))
            while "ready" not in kept.log:
                time.sleep(0.05)
            print(kept.identity, flush=True)
            time.sleep(600)
        """)
    )
    caller = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert caller.stdout is not None
    identity = caller.stdout.readline().split()[0]
    assert marked(identity)
    caller.send_signal(number)
    caller.wait(20)
    wait_until(lambda: not marked(identity))


def test_a_command_that_cannot_run_says_so() -> None:
    kept = KeptProcess(["/no/such/program"], env=dict(os.environ))
    assert kept.wait(20) == 127
    assert "/no/such/program" in kept.log


def test_a_listener_that_fails_stops_neither_the_command_nor_its_log(caplog: pytest.LogCaptureFixture) -> None:
    def listen(line: str) -> None:
        raise BrokenPipeError(line)

    code = "for number in range(20_000): print('a line of the log', number)"
    kept = KeptProcess([sys.executable, "-c", code], env=dict(os.environ), on_line=listen)
    assert kept.wait(20) == 0
    assert len(kept.lines) == 20_000
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a line of the log 0",)]


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_of_this_machine_is_not_looked_for_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert _healthy(url)
        assert subprocess.run([sys.executable, "-c", _ASK, url, "5"], input=b"", stdout=-1).stdout == b"ready\n"
        server.shutdown()


def test_importing_costs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_pp_mla.rehearsal, sglang_pp_mla.rehearsal.reference;"
        "print([name for name in ('torch', 'sglang', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_replacement_library_imports_and_raises_when_called(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.other_ran = True")
    code = """
import sys
import sgl_kernel, sgl_kernel.some.thing
from sgl_kernel.scalar_type import ScalarType, scalar_types
from typing import Optional
kind = Optional[ScalarType], ScalarType | None, scalar_types.uint4b8
assert sys.other_ran and not hasattr(sgl_kernel, "__version__")
try:
    sgl_kernel.gemm.fp8(1)
except RuntimeError as error:
    print(error)
"""
    path = os.pathsep.join([str(KERNEL_LIBRARY), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sgl_kernel.gemm.fp8" in done.stdout


def old_release(folder: Path, module: str, source: str) -> Installation:
    """A package ``sglang`` of one module."""
    path = folder / "sglang" / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in (path.parent, *path.relative_to(folder).parents[1:-1]):
        (folder / package / "__init__.py").touch()
    path.write_text(source)
    return Installation(sys.executable, None, folder / "sglang")


def in_a_rehearsal_of(release: Installation, code: str) -> str:
    """What ``code`` raises there, if anything."""
    env = rehearsal_environment(release, pp_size=1, extra={"PYTHONPATH": str(release.folder.parent)})
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    return done.stderr.rstrip().rpartition("\n")[2] if done.returncode else ""


def test_where_a_release_takes_layers_from_vllm_it_keeps_its_own(tmp_path: Path) -> None:
    own = "class SiluAndMul: pass\nown = SiluAndMul\n"
    wants = f"{own}from vllm.model_executor.layers.activation import SiluAndMul\n"
    code = """
import importlib.util
from sglang.srt.layers import activation
from vllm import _custom_ops
assert activation.SiluAndMul is activation.own
assert importlib.util.find_spec("vllm.logger") is None
"""
    assert in_a_rehearsal_of(old_release(tmp_path, "srt/layers/activation", wants), code) == ""
    without = in_a_rehearsal_of(old_release(tmp_path, "srt/layers/activation", own), code)
    assert without == "ModuleNotFoundError: No module named 'vllm'"


def test_where_stages_use_cudas_streams_they_get_the_cpus(tmp_path: Path) -> None:
    wants = "import torch\nevent = torch.cuda.Event()\nevent.record(torch.cuda.current_stream())\n"
    release = old_release(tmp_path, "srt/managers/scheduler_pp_mixin", wants)
    assert in_a_rehearsal_of(release, "import sglang.srt.managers.scheduler_pp_mixin") == ""


@pytest.mark.parametrize(
    ("cpus", "ranks", "wanted"),
    [
        ([0, 1], 4, "0|0|1|1"),
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([5], 3, "5|5|5"),
        ([0, 1, 2], 2, "0|1,2"),
    ],
)
def test_cpus_are_shared_out(cpus: list[int], ranks: int, wanted: str) -> None:
    assert cpu_sets(cpus, ranks) == wanted


def test_no_rank_and_no_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        cpu_sets([0], 0)
    with pytest.raises(ValueError, match="0 CPUs"):
        cpu_sets([], 2)


def test_the_environment_suits_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "1,2,3")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    installed = find_sglang()
    made = rehearsal_environment(installed, pp_size=4, extra={"SGLANG_PP_MLA_DISABLE": "1"})
    assert made["PYTHONPATH"] == f"{KERNEL_LIBRARY}{os.pathsep}/mine"
    assert made["SGLANG_PP_MLA_DISABLE"] == "1"
    assert "SGLANG_PP_LAYER_PARTITION" not in made
    assert "PYTHONDONTWRITEBYTECODE" not in made
    sets = made.get("SGLANG_CPU_OMP_THREADS_BIND")
    assert (sets is not None) == wants_cpu_sets(installed.folder)
    assert sets is None or sets.count("|") == 3


def test_an_interpreter_without_sglang_is_named() -> None:
    import venv

    python = Path(venv.__file__).parents[3] / "bin" / "python3"
    bare = next((str(one) for one in (Path(sys.base_prefix, "bin", "python3"), python) if one.exists()), sys.executable)
    with pytest.raises(RehearsalError, match="pip install sglang") as raised:
        find_sglang(bare, {"PYTHONNOUSERSITE": "1", "PYTHONPATH": ""})
    assert bare in str(raised.value)


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(RehearsalError, match="/no/such/python"):
        find_sglang("/no/such/python")


LOG = """\
[2026-11-29 14:38:27 PP2] Load weight begin. avail mem=5 GB
[2026-11-29 14:38:36 PP2] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3918, in run_scheduler_process
    scheduler = Scheduler(
IndexError: list index out of range

[2026-11-29 14:38:36] Received sigquit from a child process. It usually means the child failed.
[2026-11-29 14:38:36 PP7] Scheduler hit an exception: Traceback (most recent call last):
ValueError: later
""".splitlines()


def test_the_first_stage_to_die_is_found() -> None:
    death = find_death(LOG)
    assert death is not None
    assert death.rank == 2
    assert death.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert death.traceback.splitlines()[-1] == "IndexError: list index out of range"
    assert find_death(["nothing", "here"]) is None
    assert stage_step(LOG[0]) == (2, "loading weights")
    assert stage_step(LOG[2]) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pp_size": 2, "partition": "4,4"}, "adds up to 8"),
        ({"pp_size": 2, "partition": "7,0"}, "rank 1"),
        ({"pp_size": 3, "partition": "4,3"}, "3"),
        ({"pp_size": 8}, "7 layers cannot fill 8 stages"),
        ({"pp_size": 0}, "at least one stage"),
    ],
)
def test_a_partition_that_does_not_add_up_starts_nothing(
    options: dict[str, Any], says: str, kimi: dict[str, Any], tmp_path: Path
) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(shrink(kimi, layers=7)))
    with pytest.raises(ValueError, match=says), engine(tmp_path, **options):
        pass


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        run_engine(tmp_path, [[1]])


def test_words_are_one_a_token() -> None:
    vocabulary = words(512)
    assert len(vocabulary) == len(set(vocabulary)) == 512
    assert vocabulary[:3] == ["<s>", "</s>", "<unk>"]
