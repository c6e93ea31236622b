"""``sglang-pp-mla plan``: the layer partition that leaves the most KV cache."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sglang_pp_mla.cli.launch import served
from sglang_pp_mla.cli.saving import check_path, save
from sglang_pp_mla.cli.terminal import printable
from sglang_pp_mla.geometry import Model, read_config
from sglang_pp_mla.planner import GIB, Deployment, DoesNotFit, Plan, StagePlan, check, make_plan, traffic
from sglang_pp_mla.releases import RELEASES
from sglang_pp_mla.weights import COUNTED, Weights, weights_of

_BAR = 48
_BESIDE_BAR = 70  # columns of the table without the bar, and a few for longer numbers
_WIDTH = 118  # of a saved picture
# Told apart without colours too.
_PARTS = (
    ("weights", "█", "blue"),
    ("KV cache", "▓", "green"),
    ("buffers", "▒", "magenta"),
    ("activations", "░", "yellow"),
)


def plan(
    model: str = typer.Argument(
        help="A config.json, or a folder that holds one; with safetensors files in it, their headers are read.",
        metavar="MODEL",
    ),
    pp_size: int = typer.Option(..., "--pp-size", min=1, help="Pipeline stages."),
    gpu_memory: str = typer.Option(
        ..., "--gpu-memory", help="GB of a GPU, as its label has it; or one a stage: 96,96,80."
    ),
    tp_size: int = typer.Option(1, "--tp-size", min=1, help="Tensor-parallel GPUs of each stage."),
    context: int | None = typer.Option(None, "--context", min=1, help="Longest request, in tokens."),
    max_running: int | None = typer.Option(None, "--max-running", min=1, help="Requests at once."),
    kv_cache_dtype: str = typer.Option("auto", "--kv-cache-dtype", help="As SGLang's: auto, bf16, fp8_e4m3, fp8_e5m2."),
    mem_fraction_static: float | None = typer.Option(
        None, "--mem-fraction-static", min=0.01, max=0.99, help="As SGLang's; its own default if not given."
    ),
    multiprocessors: int = typer.Option(188, "--multiprocessors", min=1, help="Of a GPU; decode buffers grow with it."),
    release: str | None = typer.Option(None, "--release", help="SGLang's; the installed one, else the newest known."),
    compare: str | None = typer.Option(None, "--compare", help="Other ways to use GPUs, such as TP8,PP8,TP2xPP4."),
    network: bool = typer.Option(False, "--network", help="MODEL may be a hub id, whose config.json is fetched."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    save_to: Path | None = typer.Option(None, "--save", help="Write the report to a .svg or .html file."),
) -> None:
    """Find the layer partition with the most KV tokens, and print the line that starts it.

    SGLang's own memory arithmetic, searched exactly; no GPU, no weights, no SGLang needed. Exit code 1 where
    no partition fits, or the tokens do not suffice for --max-running requests of --context tokens.
    """
    # A quiet console would record nothing.
    unseen = io.StringIO() if as_json else None
    console = Console(highlight=False, record=save_to is not None, file=unseen, width=_WIDTH if save_to else None)
    title = f"sglang-pp-mla plan {Path(model).name} --pp-size {pp_size}"
    try:
        check_path(save_to)
        description = Model.from_config(read_config(model, allow_network=network))
        deployment = Deployment(
            gpu_bytes=_gpu_bytes(gpu_memory, pp_size),
            release=_release(release),
            tp_size=tp_size,
            kv_cache_dtype=kv_cache_dtype,
            mem_fraction_static=mem_fraction_static,
            context=context,
            max_running=max_running,
            multiprocessors=multiprocessors,
        )
        others = _others(compare, deployment)
        folder = _folder(model)
        check(description, deployment)
        weights = weights_of(description, folder, tp_size=tp_size, pp_size=pp_size)
        rows = [_alternative(description, folder, each) for each in others]
        try:
            found = make_plan(description, weights, deployment)
        except DoesNotFit as refusal:
            if as_json:
                typer.echo(json.dumps(_as_json(None, deployment, rows), indent=2))
            _show_alternatives(console, rows)
            typer.echo(str(refusal), err=True)
            if save_to is not None:
                console.file = io.StringIO()  # it is on standard error already
                console.print(Text(str(refusal), "red"))
                save(console, save_to, title)
            raise typer.Exit(1) from None
        if as_json:
            typer.echo(json.dumps(_as_json(found, deployment, rows), indent=2))
        enough, sentence = _suffices(found, deployment)
        _show(console, description, weights, deployment, found)
        if sentence:
            console.print(f"\n[{'green' if enough else 'red'}]{sentence}[/]", soft_wrap=True)
        _show_alternatives(console, rows)
        console.print("\n[bold]Start it with[/bold]")
        console.print(_launch_line(model, deployment, found), soft_wrap=save_to is None, markup=False)
        if save_to is not None:
            save(console, save_to, title)
    except ValueError as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if enough else 1)


def _printable(text: str) -> str:
    return escape(printable(text))


# What was asked


def _gpu_bytes(text: str, pp_size: int) -> tuple[int, ...]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--gpu-memory {text} is not a size in GB, nor sizes joined by commas.") from None
    if not all(0 < size < 10_000 for size in sizes):
        raise ValueError(f"--gpu-memory {text} has a size that no GPU has; give GB, such as 96.")
    if len(sizes) not in (1, pp_size):
        raise ValueError(
            f"--gpu-memory {text} has {len(sizes)} sizes but the pipeline has {pp_size} stages; give one, or {pp_size}."
        )
    return tuple(int(size * GIB) for size in sizes) * (pp_size // len(sizes))


def _release(text: str | None) -> Version:
    if text is None:
        try:
            text = importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            text = RELEASES[-1]
    try:
        release = Version(text)
    except InvalidVersion:
        raise ValueError(f"--release {text} is not a version, such as {RELEASES[-1]}.") from None
    if release < Version(RELEASES[0]):
        raise ValueError(f"--release {text} is older than {RELEASES[0]}, the first whose memory arithmetic is known.")
    return release


def _folder(model: str) -> Path | None:
    path = Path(model).expanduser()
    return path if path.is_dir() else None


def _others(text: str | None, deployment: Deployment) -> list[Deployment]:
    if text is None:
        return []
    if len(set(deployment.gpu_bytes)) > 1:
        raise ValueError("--compare needs GPUs of one size; give --gpu-memory as one number.")
    found = []
    for part in text.split(","):
        sizes = re.fullmatch(r"(?:TP(\d+))?x?(?:PP(\d+))?", part.strip(), re.IGNORECASE)
        if sizes is None or not any(sizes.groups()) or "0" in sizes.groups():
            raise ValueError(f"--compare has {part!r}; write each as TP8, PP8 or TP2xPP4.")
        tp_size, pp_size = (int(size or 1) for size in sizes.groups())
        found.append(replace(deployment, tp_size=tp_size, gpu_bytes=deployment.gpu_bytes[:1] * pp_size))
    return found


@dataclass(frozen=True)
class _Alternative:
    deployment: Deployment
    plan: Plan | None
    refusal: str
    row: dict[str, Any]

    @property
    def name(self) -> str:
        tp_size, pp_size = self.deployment.tp_size, self.deployment.pp_size
        parts = [f"TP{tp_size}"] * (tp_size > 1) + [f"PP{pp_size}"] * (pp_size > 1)
        return "x".join(parts) or "one GPU"


def _alternative(model: Model, folder: Path | None, deployment: Deployment) -> _Alternative:
    row: dict[str, Any] = {"tp_size": deployment.tp_size, "pp_size": deployment.pp_size}
    try:
        check(model, deployment)
        weights = weights_of(model, folder, tp_size=deployment.tp_size, pp_size=deployment.pp_size)
        plan = make_plan(model, weights, deployment)
    except (ValueError, DoesNotFit) as refusal:
        return _Alternative(deployment, None, str(refusal), {**row, "kv_tokens": 0, "refusal": str(refusal)})
    crossed = traffic(model, deployment.tp_size, plan.partition)
    row |= {
        "partition": list(plan.partition),
        "kv_tokens": plan.kv_tokens,
        "weight_bytes": max(stage.weight_bytes for stage in plan.stages),
        "all_reduces": crossed.all_reduces,
        "hops": crossed.hops,
        "bytes_sent": crossed.bytes_sent,
    }
    return _Alternative(deployment, plan, "", row)


# What is answered


def _environment(found: Plan) -> dict[str, str]:
    if len(found.partition) == 1:
        return {}
    return {"SGLANG_PP_LAYER_PARTITION": ",".join(map(str, found.partition))}


def _as_json(found: Plan | None, deployment: Deployment, rows: list[_Alternative]) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "partition": list(found.partition) if found else None,
        "kv_tokens": found.kv_tokens if found else 0,
        "default_partition": list(found.default_partition) if found else None,
        "default_kv_tokens": found.default_kv_tokens if found else 0,
        "gain": found.gain if found else None,
        "stages": [
            {
                "rank": stage.rank,
                "layers": stage.layers,
                "weight_bytes": stage.weight_bytes,
                "workspace_bytes": stage.workspace_bytes,
                "kv_bytes_per_token": stage.kv_bytes_per_token,
            }
            for stage in (found.stages if found else ())
        ],
        "env": _environment(found) if found else {},
    }
    if rows:
        answer["compare"] = [each.row for each in rows]
    return answer


def _launch_line(model: str, deployment: Deployment, found: Plan) -> str:
    words = [f"{name}={value}" for name, value in _environment(found).items()]
    words += ["python", "-m", "sglang.launch_server", "--model-path", shlex.quote(served(model))]
    flags: dict[str, object | None] = {
        "--tp-size": deployment.tp_size if deployment.tp_size > 1 else None,
        "--pp-size": deployment.pp_size,
        "--attention-backend": deployment.attention_backend,
        "--kv-cache-dtype": deployment.kv_cache_dtype if deployment.kv_cache_dtype != "auto" else None,
        "--mem-fraction-static": deployment.mem_fraction_static,
        "--context-length": deployment.context,
        "--max-running-requests": deployment.max_running,
    }
    for flag, value in flags.items():
        if value is not None:
            words += [flag, str(value)]
    return " ".join(words)


def _suffices(found: Plan, deployment: Deployment) -> tuple[bool, str]:
    tokens, context, requests = found.kv_tokens, deployment.context, deployment.max_running
    if context is None:
        return True, ""
    if requests is None:
        fit = tokens // context
        plural = "request" if fit == 1 else "requests"
        return fit > 0, f"{tokens:,} tokens hold {fit:,} {plural} of {context:,} tokens at once."
    needed = context * requests
    if tokens >= needed:
        return True, f"{tokens:,} tokens hold {requests:,} requests of {context:,} tokens at once ({needed:,})."
    return False, (
        f"{tokens:,} tokens do not hold {requests:,} requests of {context:,} tokens at once: {needed - tokens:,} are "
        f"missing, so {tokens // context:,} run and the others wait; lower --max-running or use fp8_e4m3 for the cache."
    )


def _show(console: Console, model: Model, weights: Weights, deployment: Deployment, found: Plan) -> None:
    dense = model.moe_layers.count(False)
    makeup = f"{model.num_layers} layers" + (f", {dense} dense" if 0 < dense < model.num_layers else "")
    attention = model.attention
    kind = f"MLA {attention.kv_lora_rank} + {attention.qk_rope_head_dim}" if attention.is_mla else "no MLA"
    source = "the checkpoint's headers" if weights.measured else "the configuration"
    console.print(
        f"[bold]{_printable(model.architecture)}[/bold]: {makeup}, {kind}, weights by {source}; "
        f"SGLang {deployment.release}, --mem-fraction-static {found.mem_fraction_static:g}",
        soft_wrap=True,
    )
    if not weights.measured and model.model_type not in COUNTED:
        console.print(
            f"[yellow]The layers of {_printable(model.model_type)} are counted as those of models like it; "
            "a folder with safetensors files is exact.[/yellow]",
            soft_wrap=True,
        )
    if deployment.release > Version(RELEASES[-1]):
        console.print(
            f"[yellow]SGLang {deployment.release} is newer than {RELEASES[-1]}, the last whose memory arithmetic was "
            "read; this is by that one's.[/yellow]",
            soft_wrap=True,
        )
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "layers", "GPU", "GB", "weights", "KV cache", "buffers", "activations", "spare"):
        table.add_column(heading, justify="left" if heading == "GPU" else "right", no_wrap=True)
    bar = max(1, min(_BAR, console.width - _BESIDE_BAR))
    first = 0
    largest = max(stage.gpu_bytes for stage in found.stages)
    for stage in found.stages:
        last = first + stage.layers - 1
        span = f"{first}-{last}" if last > first else str(first)
        table.add_row(
            f"PP{stage.rank}",
            f"{stage.layers} ({span})",
            _bar(stage, largest, bar),
            f"{stage.gpu_bytes / GIB:g}",
            *(f"{size / GIB:.1f}" for size in (*_sizes(stage), stage.spare_bytes)),
        )
        first = last + 1
    console.print(table)
    legend = Text("GiB of one GPU: ")
    for name, glyph, colour in _PARTS:
        legend.append(glyph, style=colour).append(f" {name}  ")
    console.print(legend.append("· spare, and what the runtime takes"))
    _show_default(console, found)
    if found.stock_splits > found.splits:
        console.print(
            f"triton_pp keeps room for {found.splits} KV splits in {found.slots} graph slots; stock triton would for "
            f"{found.stock_splits}, and its buffers be {found.workspace_stock_bytes / GIB:.1f} GiB.",
            soft_wrap=True,
        )


def _sizes(stage: StagePlan) -> tuple[int, int, int, int]:
    return stage.weight_bytes, stage.kv_bytes, stage.workspace_bytes, stage.reserve_bytes - stage.workspace_bytes


def _bar(stage: StagePlan, largest: int, width: int) -> Text:
    """Weights, cache, buffers and activations of a GPU, in proportion; a larger GPU has a longer bar."""
    bar, drawn, total = Text(), 0, 0
    for (_, glyph, colour), size in zip(_PARTS, _sizes(stage), strict=True):
        total += size
        end = round(width * total / largest)
        bar.append(glyph * (end - drawn), style=colour)
        drawn = end
    return bar.append("·" * (round(width * stage.gpu_bytes / largest) - drawn), style="dim")


def _show_default(console: Console, found: Plan) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("partition")
    table.add_column("KV tokens", justify="right")
    table.add_column("")
    default = ",".join(map(str, found.default_partition))
    if found.partition == found.default_partition:
        table.add_row(default, f"{found.kv_tokens:,}", "SGLang's own, and none is better")
    else:
        tokens = f"{found.default_kv_tokens:,}" if found.default_kv_tokens else "does not start"
        table.add_row(default, tokens, "SGLang's own")
        gain = f", {found.gain:+.1%}" if found.gain is not None else ""
        table.add_row(
            ",".join(map(str, found.partition)), f"[bold]{found.kv_tokens:,}[/bold]", f"the best there is{gain}"
        )
    console.print()
    console.print(table)


def _show_alternatives(console: Console, rows: list[_Alternative]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("GPUs", "", "KV tokens", "weights a GPU", "a token waits for", "busiest GPU sends a token"):
        table.add_column(heading, justify="left" if not heading else "right")
    for each in rows:
        gpus = str(each.deployment.tp_size * each.deployment.pp_size)
        if each.plan is None:
            table.add_row(gpus, each.name, "[red]none[/red]", "", "", "")
            continue
        waits = [f"{each.row['all_reduces']} all-reduces"] * (each.row["all_reduces"] > 0)
        waits += [f"{each.row['hops']} hops"] * (each.row["hops"] > 0)
        table.add_row(
            gpus,
            each.name,
            f"{each.plan.kv_tokens:,}",
            f"{each.row['weight_bytes'] / GIB:.1f} GiB",
            " and ".join(waits) or "nothing",
            f"{each.row['bytes_sent'] / 1024:,.0f} KiB",
        )
    console.print()
    console.print(table)
    for each in rows:
        if each.refusal:
            console.print(f"[red]{each.name}[/red]: {_printable(each.refusal)}", soft_wrap=True)
