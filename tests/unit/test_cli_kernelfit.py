"""The verb ``kernelfit``, as a command: what is said before anything is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_pp_mla.cli import app
from sglang_pp_mla.cli.kernelfit import table
from sglang_pp_mla.geometry import Model, read_config
from sglang_pp_mla.kernelfit import KernelFit, KernelFitError, Shapes, fit, gpu_named

MODEL = Path(__file__).parents[1] / "data" / "deepseek-v3.json"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.json"], "nowhere.json does not exist"),
        ([str(MODEL), "--tp-size", "3"], "128 heads do not divide by --tp-size 3"),
        ([str(MODEL), "--save", "report.png"], "--save report.png has no known format"),
        ([str(MODEL)], "--sglang /nowhere is no sglang package"),
        # Said before a minute of compiling.
        ([str(MODEL), "--save", "/nowhere/report.svg"], "/nowhere/report.svg names no folder that exists"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["kernelfit", *arguments, "--gpu", "H100", "--sglang", "/nowhere"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert says in result.stderr


def test_a_compiler_that_hangs_is_ended(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 20\n")
    python.chmod(0o755)
    shapes = Shapes(True, 16, 1, 576, 512, 192, 128)
    with pytest.raises(KernelFitError, match=r"it took longer than 0\.5 s, after 0 of all kernels"):
        fit(shapes, gpu_named("H100"), sglang=tmp_path, python=str(python), timeout_s=0.5)


def test_names_from_a_file_cannot_command_the_terminal(tmp_path: Path) -> None:
    config = json.loads(MODEL.read_text()) | {"architectures": ["\x1b[2J"], "hidden_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["kernelfit", str(tmp_path), "--gpu", "H100"], color=True)
    assert result.exit_code == 2
    assert "?[2J" in result.stderr
    assert "\x1b" not in result.stderr


def test_an_error_of_the_compiler_is_shown_as_it_is() -> None:
    shapes = Shapes.of_model(Model.from_config(read_config(MODEL)))
    failed = KernelFit("decode", "_fwd", (1, 1, 1), 1, error="expected [/b] in x[None, :] \x1b[2J")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table([failed], gpu_named("H100"), shapes))
    assert "expected [/b] in x[None, :] ?[2J" in shown.get()
