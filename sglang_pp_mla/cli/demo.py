"""``sglang-pp-mla demo``: the fault, the fix and the proof on this machine's CPU, in a few minutes."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_pp_mla.cli.board import Board
from sglang_pp_mla.cli.terminal import printable
from sglang_pp_mla.rehearsal import (
    FORK,
    EngineFailure,
    RehearsalError,
    Server,
    find_sglang,
    open_here,
    server,
    shrink,
)
from sglang_pp_mla.stage import Stage, default_partition, parse_partition

NEW_TOKENS = 6
QUESTION = "ba du ge ko li mo ne pa ra su"
_TRACEBACK_LINES = 7


def demo(
    pp_size: int = typer.Option(4, "--pp-size", min=1, help="Pipeline stages; each is a process on the CPU."),
    layers: int = typer.Option(7, "--layers", min=1, help="Layers of the small model."),
    partition: str | None = typer.Option(None, "--partition", help="Layers a stage, such as 4,3."),
    timeout: float = typer.Option(600.0, "--timeout", help="Seconds a server may take to start."),
) -> None:
    """Start SGLang's real server on CPU stages with stock triton, then with triton_pp, and ask it a question.

    The model is Kimi K2.6's architecture and MLA geometry with little else of its size and random weights.
    Its answer is compared with Hugging Face transformers on the same weights.
    """
    console = Console(highlight=False)
    try:
        stages = parse_partition(partition, layers, pp_size) if partition else default_partition(layers, pp_size)
        installation = find_sglang(sys.executable)
        demonstration = Demonstration(console, stages, partition, timeout)
        same = demonstration.run(installation.version or "of unknown release")
    except (ValueError, RehearsalError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if same else 1)


class Demonstration:
    """One run of the demo: what it shows, and the seconds each part took."""

    def __init__(self, console: Console, stages: tuple[Stage, ...], partition: str | None, timeout: float) -> None:
        self.console = console
        self.stages = stages
        self.partition = partition
        self.timeout = timeout
        self.took: list[tuple[str, float]] = []

    def run(self, release: str) -> bool:
        """Show it all; whether the answer was the reference's."""
        layers = self.stages[-1].end_layer
        split = ",".join(str(len(stage.layers)) for stage in self.stages)
        self.console.rule(f"SGLang {release}: {layers} layers over {len(self.stages)} CPU stages ({split})")
        with tempfile.TemporaryDirectory(prefix="sglang-pp-mla-demo-") as folder:
            model = Path(folder)
            self.console.print(
                "[bold]The model[/bold]: Kimi K2.6's architecture and MLA geometry, little else of its size"
            )
            with self._timed("model and reference answer (transformers, float32)"):
                reference = make_model_and_answer(layers, model)
            self._show_stock(model)
            answer = self._ask_triton_pp(model)
        if answer is not None:
            self._compare(answer, reference)
        self._show_times()
        return answer == reference

    def _show_stock(self, model: Path) -> None:
        self.console.print("\n[bold]Stock[/bold]: --attention-backend triton, this package disabled")
        try:
            with (
                self._timed("stock triton, until it died or was ready"),
                self._serve(model, "triton", {"SGLANG_PP_MLA_DISABLE": "1"}),
            ):
                self.console.print("It serves: the Triton backend of this release does not probe layer 0.")
        except EngineFailure as failure:
            self.console.print(Text(str(failure), "red"), soft_wrap=True)
            for line in failure.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]:
                self.console.print(line, style="dim", markup=False, soft_wrap=True)

    def _ask_triton_pp(self, model: Path) -> str | None:
        self.console.print("\n[bold]With this package[/bold]: --attention-backend triton_pp")
        try:
            with self._serve(model, "triton_pp", {"SGLANG_PP_MLA_DISABLE": ""}) as running:
                self.took.append(("triton_pp, until ready", running.ready_s))
                for line in running.log.splitlines():
                    if "triton_pp PP" in line:
                        self.console.print(line, style="dim", markup=False, soft_wrap=True)
                with self._timed(f"{NEW_TOKENS} tokens over HTTP"), self.console.status("asking over HTTP"):
                    try:
                        return ask(running.url)
                    except OSError as error:
                        raise running.failure() or RehearsalError(
                            f"The server is up and did not answer: {error}."
                        ) from error
        except EngineFailure as failure:
            self.console.print(Text(str(failure), "red"), soft_wrap=True)
            self.console.print(failure.traceback or failure.log[-3000:], markup=False)
            return None

    @contextmanager
    def _serve(self, model: Path, backend: str, env: dict[str, str]) -> Iterator[Server]:
        board = Board(self.console, self.stages)
        with (
            board,
            server(
                model,
                pp_size=len(self.stages),
                partition=self.partition,
                attention_backend=backend,
                timeout_s=self.timeout,
                env={**FORK, **env},
                on_progress=board.show,
            ) as running,
        ):
            board.close()
            yield running

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.took.append((part, time.monotonic() - began))

    def _compare(self, answer: str, reference: str) -> None:
        table = Table(show_header=False, box=None)
        table.add_row("question", QUESTION)
        table.add_row("triton_pp, over HTTP", answer)
        table.add_row("transformers", reference)
        same = answer == reference
        table.add_row("", "[green]the same answer[/green]" if same else "[red]different answers[/red]")
        self.console.print()
        self.console.print(table)

    def _show_times(self) -> None:
        table = Table("part", "seconds", title="What each part took", title_justify="left")
        table.columns[1].justify = "right"
        for part, seconds in self.took:
            table.add_row(part, f"{seconds:.1f}")
        self.console.print(table)


def make_model_and_answer(layers: int, folder: Path) -> str:
    """Write the small model and its tokenizer to ``folder``; the reference's words for the question."""
    from sglang_pp_mla.rehearsal.reference import greedy, write_model
    from sglang_pp_mla.rehearsal.shrink import kimi_k26
    from sglang_pp_mla.rehearsal.tokenizer import words, write_tokenizer

    config = shrink(kimi_k26(), layers=layers)
    vocabulary = words(config["vocab_size"])
    model = write_model(config, folder)
    write_tokenizer(folder, config["vocab_size"])
    prompt = [vocabulary.index(word) for word in QUESTION.split()]
    (answer,) = greedy(model, [prompt], NEW_TOKENS)
    return " ".join(vocabulary[token] for token in answer.tokens)


def ask(url: str) -> str:
    """The server's words for the question, from its OpenAI completions endpoint."""
    question: dict[str, Any] = {
        "model": "default",
        "prompt": QUESTION,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with open_here(request, timeout=600) as answer:
        return str(json.load(answer)["choices"][0]["text"]).strip()
