"""The command ``sglang-pp-mla``: one module a verb, and the only place that prints."""

from __future__ import annotations

import typer

from sglang_pp_mla import __version__
from sglang_pp_mla.cli import demo, diagnose, doctor, kernelfit, plan, preflight

app = typer.Typer(
    help="Serve MLA models under pipeline parallelism on SGLang's Triton attention backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="demo")(demo.demo)
app.command(name="diagnose")(diagnose.diagnose)
app.command(name="doctor")(doctor.doctor)
app.command(name="kernelfit")(kernelfit.kernelfit)
app.command(name="plan")(plan.plan)
app.command(name="preflight")(preflight.preflight)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-pp-mla {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Serve MLA models under pipeline parallelism on SGLang's Triton attention backend."""
