#!/usr/bin/env python3
"""Every reproduction and unit test of this folder, on SGLang 0.5.23 as installed and with the fault's patch.

    python run.py                       all four faults: minutes, no GPU, no network
    python run.py --fault kv-splits     one, and the unit test's and the reproduction's own words

Runs with the Python that has SGLang; git must be there. The patched tree is the installed package with copies of
the files that the patches change and links to all the rest; nothing is written to the installation. What takes
long to import is imported once for both trees, SGLang once a tree, and each file runs in a fork of that process.

Exit status: 0 every fault shows in the installed SGLang and is gone with its patch; 1 not; 2 wrong input.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RELEASE = "0.5.23"
SOURCE = "python/sglang"  # where the package is in SGLang's repository
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",  # SGLang's test_utils reads a digit
    "PYTHONDONTWRITEBYTECODE": "1",  # the links lead to the installation
    "SGLANG_PP_MLA_DISABLE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
}
UNWANTED = ("PYTHONPATH", "SGLANG_PLUGINS")
# Most of what an import of SGLang takes; whether they are here makes no difference but in time.
SLOW_TO_IMPORT = (
    *("torch", "torch._inductor.lowering", "torchvision.transforms.v2", "transformers", "flashinfer", "openai"),
    *("scipy.stats", "datasets", "aiohttp"),
)
FAULTS: dict[str, list[str]] = {  # and the arguments with which its reproduction shows it in this release
    "buffer-probe": ["--backend", "wave", "--partition", "4,3"],
    "mla-geometry": [],
    "kv-splits": [],
    "ray-plugins": [],
}


class Outcome(NamedTuple):
    status: int
    output: str

    @property
    def tests(self) -> int:
        """How many unit tests ran; 0 where unittest did not come so far."""
        ran = re.search(r"^Ran (\d+) tests? in ", self.output, re.M)
        return int(ran[1]) if ran else 0

    def __str__(self) -> str:
        if not self.tests:
            return str(self.status)
        return f"{'red' if self.status else 'green'} ({self.tests} run)"


def patch_of(fault: str) -> Path:
    (patch,) = (HERE.parent / "patches" / fault).glob(f"*{RELEASE}.patch")
    return patch


def unit_test_of(fault: str) -> Path:
    (test,) = (HERE / fault / "test").rglob("test_*.py")
    return test


# --- The patched tree --------------------------------------------------------------------------------


def overlay(package: Path, place: Path, changed: set[str]) -> None:
    """`package` at `place`: copies of the changed files, links to all else."""
    place.mkdir(parents=True)
    for entry in package.iterdir():
        inside = {path.partition("/")[2] for path in changed if path.partition("/")[0] == entry.name}
        if not inside:
            (place / entry.name).symlink_to(entry)
        elif entry.is_dir():
            overlay(entry, place / entry.name, inside)
        else:
            shutil.copyfile(entry, place / entry.name)


def make_patched_tree(package: Path, folder: Path, patches: list[Path]) -> Path:
    """A checkout's folder with SGLang in its place and the patches applied; gives what goes on the path."""
    changed = set(re.findall(rf"^\+\+\+ b/{SOURCE}/(.*)$", "".join(map(Path.read_text, patches)), re.M))
    overlay(package, folder / SOURCE, changed)
    # A temporary folder may itself lie in somebody's repository.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in patches:
        subprocess.run(["git", "apply", str(patch)], cwd=folder, env=environment, check=True)
    return (folder / SOURCE).parent


# --- In a tree ---------------------------------------------------------------------------------------


def in_fork(work: Callable[[], object], said: Path) -> Outcome:
    """Status and words of what a copy of this process does; 99 where it raises."""
    child = os.fork()
    if child:
        return Outcome(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text(errors="replace"))
    status = 99
    try:
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_file(script: Path, arguments: list[str]) -> None:
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def run_in_tree(path: Path, faults: list[str], answer: Path) -> None:
    """Import the SGLang at `path`, then fork for each reproduction and unit test."""
    sys.path.insert(1, str(path))
    os.environ["PYTHONPATH"] = str(path)  # for what a test starts
    import sglang
    from sglang.test.test_utils import maybe_stub_sgl_kernel

    if Path(sglang.__file__).parent != path / "sglang":
        raise RuntimeError(f"{sglang.__file__} was imported, not what is at {path}")
    maybe_stub_sgl_kernel()
    import sglang.srt.layers.attention.triton_backend

    said = answer.with_suffix(".said")
    outcomes = {
        fault: [
            in_fork(partial(run_file, HERE / fault / "repro.py", FAULTS[fault]), said),
            in_fork(partial(run_file, unit_test_of(fault), []), said),
        ]
        for fault in faults
    }
    answer.write_text(json.dumps(outcomes))


def outcomes_in(path: Path, faults: list[str], answer: Path) -> dict[str, list[Outcome]]:
    tree = in_fork(partial(run_in_tree, path, faults, answer), answer.with_suffix(".log"))
    if tree.status:
        raise RuntimeError(f"SGLang at {path} could not be run:\n{tree.output}")
    return {fault: [Outcome(*each) for each in outcomes] for fault, outcomes in json.loads(answer.read_text()).items()}


# --- The table ---------------------------------------------------------------------------------------


def as_it_should(untouched: list[Outcome], patched: list[Outcome]) -> bool:
    """Reproduction 1 then 0; the unit test fails, then the same tests pass."""
    (repro_before, test_before), (repro_after, test_after) = untouched, patched
    return (
        (repro_before.status, repro_after.status) == (1, 0)
        and (test_before.status, test_after.status) == (1, 0)
        and test_before.tests == test_after.tests > 0
    )


def report(faults: list[str], untouched: dict[str, list[Outcome]], patched: dict[str, list[Outcome]]) -> int:
    rows = [("fault", "repro untouched", "repro patched", "unit test untouched", "unit test patched", "")]
    failed = False
    for fault in faults:
        good = as_it_should(untouched[fault], patched[fault])
        failed |= not good
        (repro_before, test_before), (repro_after, test_after) = untouched[fault], patched[fault]
        cells = map(str, (repro_before, repro_after, test_before, test_after))
        rows.append((fault, *cells, "" if good else "NOT AS IT SHOULD BE"))
        if not good or len(faults) == 1:
            for tree, outcomes in (("untouched", untouched[fault]), ("patched", patched[fault])):
                for what, outcome in zip(("reproduction", "unit test"), outcomes, strict=True):
                    print(f"--- {fault}, {tree}: {what}\n{outcome.output.rstrip()}\n")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, help="this one alone")
    asked = parser.parse_args()
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None or importlib.metadata.version("sglang") != RELEASE:
        parser.error(f"run it with the Python of an SGLang {RELEASE}, for which the patches are")
    if shutil.which("git") is None:
        parser.error("git is not there, which applies the patches")
    wanted = {name: value for name, value in os.environ.items() if name not in UNWANTED} | ENVIRONMENT
    if os.environ != wanted:  # some of it counts from the first line on
        os.execve(sys.executable, [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]], wanted)
    package = Path(spec.origin).parent
    faults = [asked.fault] if asked.fault else list(FAULTS)
    for name in SLOW_TO_IMPORT:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        path = make_patched_tree(package, folder / "patched", [patch_of(fault) for fault in faults])
        untouched = outcomes_in(package.parent, faults, folder / "untouched.json")
        patched = outcomes_in(path, faults, folder / "patched.json")
    return report(faults, untouched, patched)


if __name__ == "__main__":
    sys.exit(main())
