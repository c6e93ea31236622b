"""The command ``sglang-pp-mla``: one module a verb, and the only place that prints."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from sglang_pp_mla import __version__

VERBS = ("demo", "diagnose", "doctor", "kernelfit", "plan", "preflight")


class _Verbs(TyperGroup):
    """Imports the module of the verb that is called, and all of them for the help and for a misspelt one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # With a misspelt name typer compares those that it has.
        for verb in (cmd_name,) if cmd_name in VERBS else VERBS:
            alone = typer.Typer(add_completion=False)
            alone.command(name=verb)(getattr(import_module(f"{__name__}.{verb}"), verb))
            self.commands[verb] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=_Verbs,
    help="Serve MLA models under pipeline parallelism on SGLang's Triton attention backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-pp-mla {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Serve MLA models under pipeline parallelism on SGLang's Triton attention backend."""
