"""Every published wheel has what this package relies on, and docs/compatibility.md says what was found.

The wheels do not depend on the SGLang that is installed, so this runs once: under the newest that has a lock.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.fixes import BUILT_IN, Changes
from sglang_pp_mla.fixes.buffer_probe import FIX
from sglang_pp_mla.releases import FAULTS, MODULES, RELEASES, Span
from tests.contract.contract import RUNNER, Report, Wheel, changes, judge

ROOT = Path(__file__).resolve().parents[2]
LOCKED = [Version(path.stem.removeprefix("sglang-")) for path in (ROOT / "tools/locks").glob("sglang-*.txt")]

pytestmark = pytest.mark.skipif(
    Version(importlib.metadata.version("sglang")) != max(LOCKED),
    reason=f"the wheels are judged once, in the environment of SGLang {max(LOCKED)}",
)


@cache
def wheels() -> dict[str, Path]:
    """The unpacked wheel of every release, fetched where missing; one that cannot be had is an error."""
    command = [sys.executable, ROOT / "tools/wheels", "--all"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {release: Path(line) / "sglang" for release, line in zip(RELEASES, done.stdout.split(), strict=True)}


@cache
def report(release: str) -> Report:
    return judge(wheels()[release], release)


def found(report: Report) -> dict[str, list[str]]:
    return {check: sentences for check, sentences in report.missing.items() if sentences}


@pytest.mark.parametrize("release", RELEASES)
def test_the_wheel_has_all_that_is_relied_on(release: str) -> None:
    assert found(report(release)) == {}


def test_nothing_is_known_of_what_no_fix_needs() -> None:
    assert set(FAULTS) == {fix.name for fix in BUILT_IN}
    assert set(MODULES) <= {module for fix in BUILT_IN for module in fix.changes}
    spans = [*MODULES.values(), *(span for files in FAULTS.values() for span in files.values())]
    assert {end for span in spans for end in (span.first, span.last or RELEASES[-1])} <= set(RELEASES)


# What a release may lose or change, and what then turns red: nothing else may.


@dataclass(frozen=True)
class Mutation:
    release: str
    file: str
    old: str
    new: str
    red: tuple[str, ...]


MUTATIONS = {
    "a registry without triton": Mutation(
        "0.5.23",
        "srt/layers/attention/attention_registry.py",
        '@register_attention_backend("triton")',
        '@register_attention_backend("triton_mla")',
        ("triton-pp: attention_registry", "factory"),
    ),
    "a factory that constructs another class": Mutation(
        "0.5.23",
        "srt/layers/attention/attention_registry.py",
        "    return TritonAttnBackend(runner)",
        "    return make_backend(TritonAttnBackend, runner)",
        ("factory",),
    ),
    "choices without triton": Mutation(
        "0.5.23", "srt/arg_groups/choices.py", '    "triton",\n    "torch_native",', "", ("triton-pp: server_args",)
    ),
    "an argument with other choices": Mutation(
        "0.5.23",
        "srt/arg_groups/fields/exec_.py",
        "            choices=ATTENTION_BACKEND_CHOICES,",
        "            choices=KERNELS,",
        ("arguments",),
    ),
    "a record that seals every name": Mutation(
        "0.5.23", "srt/server_args.py", '.startswith("_")', '.startswith("$")', ("arguments",)
    ),
    "no draft factory": Mutation("0.5.23", "srt/speculative/draft_utils.py", "", "", ("buffer-probe: draft_utils",)),
    "a draft factory with a runner of another name": Mutation(
        "0.5.23",
        "srt/speculative/draft_utils.py",
        "self.draft_model_runner = ",
        "self.draft_runner = ",
        ("draft workers",),
    ),
    "layers under another name": Mutation(
        "0.5.23",
        "srt/model_executor/model_runner_components/layer_setup.py",
        "    start_layer: int",
        "    first_layer: int",
        ("runner",),
    ),
    "another entry point": Mutation(
        "0.5.23", "srt/plugins/__init__.py", '"sglang.srt.plugins"', '"sglang.plugins"', ("plugins",)
    ),
    "an actor of another name": Mutation(
        "0.5.23",
        "srt/ray/scheduler_actor.py",
        "class SchedulerActor:",
        "class Actor:",
        ("triton-pp: scheduler_actor", "ray-plugins: scheduler_actor"),
    ),
    "pools that number layers another way": Mutation(
        "0.5.23", "srt/mem_cache/memory_pool.py", "self.start_layer = start_layer or 0", "pass", ("pools",)
    ),
    "a builder that builds nothing": Mutation(
        "0.5.23",
        "srt/model_executor/model_runner_components/attention_backend_setup.py",
        "ATTENTION_BACKENDS[backend_str]",
        "backend_of(backend_str)",
        ("builders",),
    ),
    "builders of other names": Mutation(
        "0.5.11",
        "srt/model_executor/model_runner.py",
        "_attention_backend(self",
        "_backend(self",
        ("triton-pp: model_runner", "buffer-probe: model_runner", "builders"),
    ),
    "splits under another name": Mutation(
        "0.5.11", "srt/layers/attention/triton_backend.py", "self.max_kv_splits", "self.kv_splits", ("constructor",)
    ),
    "a probe that is gone": Mutation(
        "0.5.11",
        "srt/layers/attention/wave_backend.py",
        "get_value_buffer(0)",
        "get_value_buffer(first)",
        ("buffer-probe: fault",),
    ),
    "a probe that is new": Mutation(
        "0.5.11",
        "srt/layers/attention/torch_native_backend.py",
        "    def __init__(self, model_runner: ModelRunner):\n",
        "    def __init__(self, model_runner: ModelRunner):\n        self.pool.get_key_buffer(0)\n",
        ("buffer-probe: fault",),
    ),
}


def mutated(mutation: Mutation, folder: Path) -> Path:
    """A copy of a wheel, of links but for one file; without an old text, the file is gone."""
    wheel = wheels()[mutation.release]
    shutil.copytree(wheel / "srt", folder / "sglang/srt", copy_function=os.symlink)
    for beside in wheel.iterdir():
        if beside.name != "srt":
            (folder / "sglang" / beside.name).symlink_to(beside)
    file = folder / "sglang" / mutation.file
    text = file.read_text(encoding="utf-8")
    file.unlink()
    if mutation.old:
        assert mutation.old in text, f"{mutation.release} has no {mutation.old!r} to change"
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return folder / "sglang"


@pytest.mark.parametrize("title", MUTATIONS)
def test_a_changed_release_turns_red(title: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[title]
    red = found(judge(mutated(mutation, tmp_path), mutation.release))
    assert tuple(red) == mutation.red
    sentences = [sentence for each in red.values() for sentence in each]
    assert all(sentence.startswith("srt/") and ".py: " in sentence for sentence in sentences)


def leaves_something(module: Any, _: Changes) -> None:
    module.ModelRunner.init_attention_backend = None


def changes_nothing(_: Any, __: Changes) -> None:
    pass


def stumbles(module: Any, _: Changes) -> None:
    module.ModelRunner.no_such_method  # noqa: B018


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (leaves_something, f"does not take back its change of {RUNNER}.ModelRunner.init_attention_backend"),
        (changes_nothing, "changes nothing"),
        (stumbles, "fails on it: AttributeError"),
    ],
)
def test_a_fix_that_does_not_keep_its_word_turns_red(change: Callable[..., None], said: str) -> None:
    fix = replace(FIX, changes={RUNNER: change})
    (sentence,) = changes(Wheel(wheels()["0.5.11"], "0.5.11"), fix, RUNNER)
    assert said in sentence


# The tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("tools_compatibility", str(ROOT / "tools/compatibility"))
    spec = importlib.util.spec_from_loader("tools_compatibility", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_document_is_what_the_tool_would_write(tool: ModuleType) -> None:
    reports = [report(release) for release in RELEASES]
    written = tool.document(reports, tool.read("matrix.json"), tool.read("audit.json"))
    assert tool.DOCUMENT.read_text(encoding="utf-8") == written, "run tools/compatibility and commit what it writes"


def test_the_document_says_what_was_run_and_what_is_red(tool: ModuleType) -> None:
    green, red = report("0.5.11"), replace(report("0.5.23"), missing={"pools": ["srt/x.py: no y"]})
    probe, stock = {"triton": 1, "triton_pp_active": 0}, {"outcome": "dies", "detail": "on PP2"}
    ran = {"0.5.11": {"repro": probe, "stock": stock, "how": "alone", "measured": "2026-01-02"}}
    text = tool.document([green, red], ran, None)
    assert "| green | dies | not run |" in text
    assert "| **red** | not run | not run |" in text
    assert "| 0.5.11 | another layer's, or none | right | dies: on PP2 | not run | alone | 2026-01-02 |" in text
    assert "- 0.5.23, pools: srt/x.py: no y" in text
    assert "Nothing was audited." in text


def test_the_document_lists_what_the_audit_found(tool: ModuleType) -> None:
    audit = [
        {"where": "a.py: f", "releases": ["0.5.5", "0.5.3.post3", "0.5.4", "0.5.23"], "verdict": "safe"},
        {"where": "b.py: g", "releases": ["0.5.21", "0.5.23", "0.5.22"], "verdict": "faulty", "upstream": "#12"},
    ]
    text = tool.document([report("0.5.11")], None, audit)
    assert "2 found, 1 of them safe" in text
    assert "a.py" not in text
    assert "| `b.py: g` | 0.5.21 – 0.5.23 | faulty |" in text  # noqa: RUF001
    assert "[#12](https://github.com/sgl-project/sglang/issues/12)" in text


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tools/compatibility", *arguments], capture_output=True, text=True)


def test_a_release_that_is_not_listed_is_judged_like_the_newest(tmp_path: Path) -> None:
    good, bad = wheels()["0.5.23"].parent, mutated(MUTATIONS["choices without triton"], tmp_path).parent
    done = run_tool("--check", good, bad)
    assert done.returncode == 1, done.stderr
    first, second = done.stdout.split(f"SGLang {bad}\n")
    assert "  missing\n" not in first
    assert second.count("  missing\n") == 1
    assert "srt/server_args.py: triton-pp does not recognise it" in second
    assert run_tool("--check", good).returncode == 0


@pytest.mark.parametrize(
    ("release", "to_0_5_11", "from_0_5_12"),
    [
        ("0.5.11", True, False),
        ("0.5.11+cu130", True, False),
        ("0.5.2", False, False),
        ("0.5.12.dev3", False, False),
        ("0.5.24.dev7+g1234567", False, True),
        ("a build of one's own", False, True),
    ],
)
def test_a_version_that_is_no_known_release_is_judged_by_its_number(
    release: str, to_0_5_11: bool, from_0_5_12: bool
) -> None:
    assert (release in Span("0.5.3", "0.5.11")) is to_0_5_11
    assert (release in Span("0.5.12")) is from_0_5_12
