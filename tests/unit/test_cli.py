"""The command: its verbs, and what calling one costs."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from sglang_pp_mla.cli import VERBS, app


def test_the_help_names_every_verb_and_a_misspelt_one_is_put_right() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    assert all(f"│ {verb} " in shown.stdout for verb in VERBS)
    wrong = CliRunner().invoke(app, ["plann"], env={"COLUMNS": "100"})
    assert wrong.exit_code == 2
    assert "Did you mean 'plan'?" in wrong.stderr


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
