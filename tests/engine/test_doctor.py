"""``doctor --deep``: SGLang's own word on what this package does, on the installed release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from sglang_pp_mla import releases
from sglang_pp_mla.fixes import BUILT_IN


@pytest.mark.release("0.5.23")
def test_with_sglang_imported_each_fix_says_what_it_did() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_pp_mla.cli", "doctor", "--deep", "--json"],
        env={key: value for key, value in os.environ.items() if key != "SGLANG_PP_MLA_DISABLE"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    faulty = {
        name for name, files in releases.FAULTS.items() if any(version("sglang") in span for span in files.values())
    }
    states = {fix["name"]: fix["state"] for fix in report["fixes"]}
    for fix in BUILT_IN:
        if fix.name in releases.FAULTS:
            assert states[fix.name] == ("applied" if fix.name in faulty else "not needed"), report["fixes"]
    status = {each["id"]: each["status"] for each in report["installation"]}
    assert (status["import"], status["registered"]) == ("pass", "pass")
