"""The line numbers by which a log's release is told are those of the published wheels."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from sglang_pp_mla.frames import releases_with
from sglang_pp_mla.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
NEWEST = max(Version(path.stem.removeprefix("sglang-")) for path in (ROOT / "tools/locks").glob("sglang-*.txt"))


@pytest.mark.skipif(Version(importlib.metadata.version("sglang")) != NEWEST, reason=f"once, under SGLang {NEWEST}")
def test_frames_are_those_of_the_wheels() -> None:
    assert subprocess.run([sys.executable, ROOT / "tools/frames", "--check"]).returncode == 0, "run tools/frames"


def test_a_start_up_that_dies_names_its_release_alone() -> None:
    """Of releases that cannot be told apart, a pair each, both are named: their files are the same."""
    frames = json.loads((ROOT / "sglang_pp_mla/frames.json").read_text(encoding="utf-8"))
    told = {}
    for release in RELEASES:
        possible = frozenset(RELEASES)
        for file, functions in frames.items():
            for function, lines in functions.items():
                for number in lines.get(release, ()):
                    found = releases_with(f'File "/v/sglang/srt/{file}", line {number}, in {function}')
                    assert found is not None
                    assert release in found
                    possible &= found
        told[release] = possible
    assert {release: others for release, others in told.items() if len(others) > 2} == {}
    assert sum(len(others) == 1 for others in told.values()) >= 29
