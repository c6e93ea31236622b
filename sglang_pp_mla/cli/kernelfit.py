"""``sglang-pp-mla kernelfit``: the attention kernels of a rank, compiled for a GPU that is not here."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from sglang_pp_mla.cli.saving import check_path, save
from sglang_pp_mla.cli.terminal import printable
from sglang_pp_mla.geometry import Model, read_config
from sglang_pp_mla.kernelfit import Gpu, KernelFit, KernelFitError, Shapes, fit, gpu_named, serving
from sglang_pp_mla.rehearsal import RehearsalError, find_sglang

_WIDTH = 118  # of a saved picture


def kernelfit(
    model: str = typer.Argument(help="A config.json, or a folder that holds one.", metavar="MODEL"),
    gpu: str = typer.Option(..., "--gpu", help="A product, such as H100 or 'RTX PRO 6000', or sm_90."),
    tp_size: int = typer.Option(1, "--tp-size", min=1, help="Tensor-parallel ranks that share the heads."),
    kv_cache_dtype: str = typer.Option("auto", "--kv-cache-dtype", help="As SGLang's: auto, bf16, fp8_e4m3, fp8_e5m2."),
    page_size: int = typer.Option(1, "--page-size", min=1, help="Tokens of a page of the KV cache."),
    sglang: Path | None = typer.Option(None, "--sglang", help="Folder of another sglang package than the installed."),
    network: bool = typer.Option(False, "--network", help="MODEL may be a hub id, whose config.json is fetched."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: a list, one object a kernel."),
    save_to: Path | None = typer.Option(None, "--save", help="Write the table to a .svg or .html file."),
) -> None:
    """Compile the Triton attention kernels that SGLang, and this package, would launch, and show what they need.

    The installed SGLang's own launchers say which kernels and with which parameters. No GPU is needed, only
    torch and Triton. Exit code 1 if a kernel that would serve does not compile or does not fit.
    """
    unseen = io.StringIO() if as_json else None
    console = Console(highlight=False, record=save_to is not None, file=unseen, width=_WIDTH if save_to else None)
    try:
        check_path(save_to)
        wanted = gpu_named(gpu)
        description = Model.from_config(read_config(model, allow_network=network))
        shapes = Shapes.of_model(description, tp_size, kv_dtype=kv_cache_dtype, page_size=page_size)
        if sglang is not None and not (sglang / "srt").is_dir():
            raise ValueError(f"--sglang {sglang} is no sglang package; give the folder that holds its srt.")
        folder = sglang or find_sglang().folder
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("compiling", total=None)
            found = fit(
                shapes, wanted, sglang=folder, on_fit=lambda _, number: progress.update(bar, advance=1, total=number)
            )
        if as_json:
            typer.echo(json.dumps([{**asdict(one), "fits": one.fits} for one in found], indent=2))
        console.print(table(found, wanted, shapes))
        if save_to is not None:
            save(console, save_to, f"sglang-pp-mla kernelfit {Path(model).name} --gpu {gpu}")
    except (ValueError, RehearsalError, KernelFitError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if all(one.fits for one in serving(found)) else 1)


def table(found: list[KernelFit], gpu: Gpu, shapes: Shapes) -> Table:
    name = gpu.capability.name if gpu.name == gpu.capability.name else f"{gpu.name} ({gpu.capability.name})"
    rows = Table(title=f"{name}, {shapes.heads} heads, {shapes.key_width} wide", title_justify="left")
    for heading, justify in (
        ("launched for", "left"),
        ("kernel", "left"),
        ("shared memory", "right"),
        ("registers", "right"),
        ("spilled", "right"),
        ("blocks a multiprocessor", "right"),
    ):
        rows.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for one in found:
        if one.error is not None:
            rows.add_row(one.path, one.kernel, Text(printable(one.error), "red"))
            continue
        of = f"{one.shared:,} of {one.shared_limit:,}"
        shared = of if one.blocks else f"[red]{of}[/red]"
        spilled = f"{one.spilled} B" if one.spilled else ""
        rows.add_row(one.path, one.kernel, shared, str(one.registers), spilled, str(one.blocks))
    return rows
