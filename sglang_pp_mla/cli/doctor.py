"""``sglang-pp-mla doctor``: what is here, what was done about it and what would stop a server, for a bug report."""

from __future__ import annotations

import io
import json
import platform
import re
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from sglang_pp_mla import __version__
from sglang_pp_mla.cli.saving import check_path, save
from sglang_pp_mla.cli.terminal import printable
from sglang_pp_mla.doctor import DoctorError, Report, examine

_MARKS = {"pass": "ok", "warn": "WARN", "fail": "FAIL", "skip": "-"}
_STYLES = {"warn": "yellow", "fail": "red", "unrecognised": "red", "skip": "dim", "not needed": "dim"}


def doctor(
    deep: bool = typer.Option(False, "--deep", help="Import SGLang in a child process and ask what it knows."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    save_to: Path | None = typer.Option(None, "--save", help="Also write the report to FILE.svg or FILE.html."),
) -> None:
    """Say which SGLang is here, which faults it has, what was done about each, and what would stop a server.

    Plain text to paste into a bug report: your home folder is written as ~. Takes two seconds and imports no
    SGLang; --deep does, out of sight of any GPU, in half a minute. Exit status 1: something would stop a server.
    """
    # Asked for or not, the file is written from what a console of its own has recorded.
    console = Console(highlight=False, soft_wrap=True, record=save_to is not None and not as_json)
    try:
        check_path(save_to)
        report = examine(deep=deep)
        if as_json:
            typer.echo(json.dumps(_json(report), indent=2))
            console = Console(highlight=False, record=True, file=io.StringIO(), width=160)
        if not as_json or save_to is not None:
            _print(report, console)
        if save_to is not None:
            save(console, save_to, "sglang-pp-mla doctor")
    except (DoctorError, ValueError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if report.serves else 1)


def _json(report: Report) -> dict[str, object]:
    return {
        "sglang": report.sglang,
        "fixes": [
            {"name": fix.name, "state": fix.state, "why": without_home(fix.why), "upstream": list(fix.upstream)}
            for fix in report.fixes
        ],
        "installation": [
            {"id": each.id, "status": each.status, "remedy": without_home(each.remedy)} for each in report.installation
        ],
    }


def _print(report: Report, console: Console) -> None:
    console.print(
        f"sglang-pp-mla {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"SGLang {report.sglang or 'absent'}"
    )
    console.print("\nFixes")
    for fix in report.fixes:
        upstream = f" ({', '.join(fix.upstream)})" if fix.upstream else ""
        _line(console, fix.name, fix.state, without_home(fix.why) + upstream, _STYLES.get(fix.state, "green"), 23, 12)
    console.print("\nInstallation")
    for each in report.installation:
        style = _STYLES.get(each.status, "green")
        _line(console, each.id, _MARKS[each.status], without_home(each.found), style, 15, 4)
        if each.remedy:
            console.print(Text(f"  {'':15}  {'':4}  {printable(without_home(each.remedy))}"))


def _line(console: Console, name: str, state: str, text: str, style: str, name_width: int, state_width: int) -> None:
    console.print(Text.assemble(f"  {name:{name_width}}  ", (f"{state:{state_width}}", style), f"  {printable(text)}"))


def without_home(text: str) -> str:
    """The home folder as ~, so that a report names nobody."""
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=/|$|[\s;,])", "~", text) if home != "/" else text
