"""The command: its verbs, and what calling one costs."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_pp_mla.cli import VERBS, app, demo
from sglang_pp_mla.rehearsal import EngineFailure
from sglang_pp_mla.stage import stages_of


def test_the_help_names_every_verb_and_a_misspelt_one_is_put_right() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    assert all(f"│ {verb} " in shown.stdout for verb in VERBS)
    wrong = CliRunner().invoke(app, ["plann"], env={"COLUMNS": "100"})
    assert wrong.exit_code == 2
    assert "Did you mean 'plan'?" in wrong.stderr


def test_a_wrong_call_of_the_demo_is_one_sentence_and_2() -> None:
    wrong = CliRunner().invoke(app, ["demo", "--partition", "[/4],3"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("The partition '[/4],3' is not a list of layer counts;")
    assert len(wrong.stderr.splitlines()) == 1


def test_what_killed_a_server_is_shown_as_it_was_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        raise EngineFailure("The server died: OSError: [/dev/shm]", log="", rank=None, traceback="")

    monkeypatch.setattr(demo, "server", dies)
    shown = io.StringIO()
    demo.Demonstration(Console(file=shown), stages_of((4, 3)), None, 1.0)._show_stock(tmp_path)
    assert "OSError: [/dev/shm]" in shown.getvalue()


def test_a_verb_imports_no_other() -> None:
    script = (
        "import sys; from sglang_pp_mla.cli import app\n"
        "try: app(['plan', '--help'])\n"
        "finally: print(*(name for name in sys.modules if name.startswith('sglang_pp_mla.cli.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    others = {f"sglang_pp_mla.cli.{verb}" for verb in VERBS} - {"sglang_pp_mla.cli.plan"}
    assert "sglang_pp_mla.cli.plan" in done.stderr
    assert not others & set(done.stderr.split())
