"""``sglang-pp-mla preflight``: will this deployment start, and compute the right thing? No GPU, no weights."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_pp_mla.cli.board import Board
from sglang_pp_mla.cli.launch import served
from sglang_pp_mla.cli.saving import check_path, save
from sglang_pp_mla.cli.terminal import printable
from sglang_pp_mla.geometry import read_config
from sglang_pp_mla.preflight import BUILT_IN, Check, Deployment, Verdict, as_json, run
from sglang_pp_mla.rehearsal import Installation, Progress, RehearsalError, find_sglang
from sglang_pp_mla.stage import stages_of

if TYPE_CHECKING:
    from sglang_pp_mla.kernelfit import Gpu

_MARKS = {"pass": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skip": ("skip", "dim")}
_WIDTH = 120  # of a saved picture
# SGLang takes the last of two; the checks would have been of another deployment.
_OWN = {
    **dict.fromkeys(("--pp-size", "--pipeline-parallel-size"), "--pp-size"),
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "--tp-size"),
    "--attention-backend": "--backend",
    **dict.fromkeys(("--model-path", "--model"), "MODEL"),
}


def preflight(
    model: str = typer.Argument(help="A config.json, or a folder that holds one.", metavar="MODEL"),
    pp_size: int = typer.Option(..., "--pp-size", min=1, help="Pipeline stages."),
    tp_size: int = typer.Option(1, "--tp-size", min=1, help="Tensor-parallel GPUs of each stage."),
    partition: str | None = typer.Option(
        None, "--partition", envvar="SGLANG_PP_LAYER_PARTITION", help="Layers a stage, such as 8,8,8,7."
    ),
    backend: str = typer.Option("triton_pp", "--backend", help="As SGLang's --attention-backend."),
    gpu: str | None = typer.Option(None, "--gpu", help="A product, such as H100 or 'RTX PRO 6000', or sm_90."),
    sglang_args: str = typer.Option(
        "", "--sglang-args", help='Other flags for SGLang, in quotes: "--kv-cache-dtype fp8_e4m3".'
    ),
    rehearse: bool = typer.Option(False, "--rehearse", help="Run the real engine, shrunk, on this CPU; minutes."),
    network: bool = typer.Option(False, "--network", help="MODEL may be a hub id, whose config.json is fetched."),
    to_json: bool = typer.Option(False, "--json", help="Print JSON."),
    save_to: Path | None = typer.Option(None, "--save", help="Write the report to a .svg or .html file."),
) -> None:
    """Check a deployment before any weights are loaded: one line a check, with the ranks and the remedy.

    First the configuration, the split and SGLang's class for the model, then the installed SGLang's own argument
    check, its KV pools stage by stage, and with --gpu its kernels; with --rehearse the real engine over these
    stages and over one. No GPU is touched, no port and no network. Exit code 1 if something fails.
    """
    console = Console(highlight=False, record=save_to is not None, quiet=to_json, width=_WIDTH if save_to else None)
    try:
        check_path(save_to)
        folder = Path(model).expanduser()
        deployment = Deployment(
            read_config(model, allow_network=network),
            pp_size,
            tp_size=tp_size,
            partition=partition,
            backend=backend,
            gpu=_gpu(gpu),
            sglang_args=_checked(sglang_args),
            rehearse=rehearse,
            folder=folder.absolute() if folder.is_dir() else None,
            installation=_installation(),
            disabled=os.environ.get("SGLANG_PP_MLA_DISABLE", ""),
        )
        checks = (*BUILT_IN, *_of_plugins())
        with Lines(console, deployment) as lines:
            good = run(deployment, checks, lines.show)
        if to_json:
            typer.echo(json.dumps(as_json(deployment), indent=2))
            console = Console(highlight=False, record=True, file=io.StringIO(), width=_WIDTH)
            for verdict in deployment.verdicts:
                _print(console, verdict)
        _print_end(console, deployment, model, good)
        if save_to is not None:
            save(console, save_to, f"sglang-pp-mla preflight {Path(model).name} --pp-size {pp_size}")
    except ValueError as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


def _gpu(name: str | None) -> Gpu | None:
    if name is None:
        return None
    from sglang_pp_mla.kernelfit import gpu_named

    return gpu_named(name)


def _checked(sglang_args: str) -> str:
    try:
        words = shlex.split(sglang_args)
    except ValueError as error:
        raise ValueError(f"--sglang-args {sglang_args!r} is no command line ({error}); close its quotes.") from error
    for flag in (word.partition("=")[0] for word in words):
        if flag in _OWN:
            raise ValueError(f"--sglang-args sets {flag}; give preflight's own {_OWN[flag]} instead.")
    return sglang_args


def _installation() -> Installation | None:
    try:
        return find_sglang(sys.executable)
    except RehearsalError:
        return None


def _of_plugins() -> list[Check]:
    from sglang_pp_mla.wiring.plugins import checks_of_plugins

    return checks_of_plugins()


class Lines:
    """Verdicts as they fall; meanwhile what takes long, and the stages of an engine as they boot."""

    def __init__(self, console: Console, deployment: Deployment) -> None:
        self._console = console
        self._deployment = deployment
        self._status = console.status("looking")
        self._board: Board | None = None
        self._size = 0
        self._lock = threading.Lock()
        deployment.on_progress = self._show_progress

    def __enter__(self) -> Lines:
        if self._console.is_terminal and not self._console.quiet:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        self._close_board()

    def show(self, verdict: Verdict) -> None:
        """A verdict has fallen."""
        self._close_board()
        _print(self._console, verdict)
        if verdict.id == "mla-geometry":
            self._status.update("asking the installed SGLang, up to a minute")
        elif verdict.id == "buffer-probe":
            self._status.update("compiling kernels")

    def _show_progress(self, pp_size: int, progress: Progress) -> None:
        """Called from the threads that read an engine's log and its answers."""
        if self._console.quiet:
            return
        with self._lock:
            if self._board is None or pp_size != self._size:
                self._status.stop()
                self._close_board()
                self._size = pp_size
                stages = self._deployment.stages
                self._console.print(f"rehearsing --pp-size {pp_size}")
                self._board = Board(self._console, stages if pp_size > 1 else stages_of((stages[-1].end_layer,)))
                self._board.__enter__()
            self._board.show(progress)

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


def _print(console: Console, verdict: Verdict) -> None:
    mark, style = _MARKS[verdict.status]
    ranks = f" [{_ranks(verdict.ranks)}]" if verdict.ranks else ""
    line = Table.grid(padding=(0, 2))
    line.add_column(width=4)
    line.add_column(width=13)
    line.add_column(overflow="fold")
    line.add_row(Text(mark, style), Text(printable(verdict.id)), Text(printable(verdict.summary) + ranks))
    if verdict.remedy:
        line.add_row("", "", Text(printable(verdict.remedy), "bold" if verdict.status == "fail" else "dim"))
    console.print(line)


def _ranks(ranks: Sequence[int]) -> str:
    """Neighbours together: ``PP1, PP3-PP7``."""
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ", ".join(f"PP{group[0]}" + (f"-PP{group[-1]}" if group[1:] else "") for group in groups)


def _print_end(console: Console, deployment: Deployment, model: str, good: bool) -> None:
    if not good:
        failed = list(dict.fromkeys(verdict.id for verdict in deployment.verdicts if verdict.status == "fail"))
        console.print(Text(f"\nDo not start it yet: {', '.join(failed)} failed.", "red"))
        return
    console.print(Text("\nStart it with", "bold"))
    console.print(Text(launch_line(deployment, model)), soft_wrap=not console.record)


def launch_line(deployment: Deployment, model: str) -> str:
    """The command that serves what was checked."""
    words = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        served(model),
        "--pp-size",
        str(deployment.pp_size),
    ]
    if deployment.tp_size > 1:
        words += ["--tp-size", str(deployment.tp_size)]
    words += ["--attention-backend", deployment.backend]
    line = " ".join([shlex.join(words), *([deployment.sglang_args] if deployment.sglang_args else [])])
    if not deployment.partition:
        return line
    return f"SGLANG_PP_LAYER_PARTITION={','.join(str(len(stage.layers)) for stage in deployment.stages)} {line}"
