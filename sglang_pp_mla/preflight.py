"""Will this deployment start, and compute the right thing? The checks, in order of cost, as data.

A check looks at a :class:`Deployment` and gives verdicts. What several of them need, the deployment works out
once and keeps: the model, its stages, what the installed SGLang says. A check whose grounds are missing, since
the configuration is wrong or there is no SGLang, is skipped and says so. Importing this costs neither torch
nor SGLang; the checks of SGLang's own code ask it in a child interpreter that sees no GPU.
"""

from __future__ import annotations

import ast
import json
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.version import Version

from sglang_pp_mla import planner
from sglang_pp_mla.backend_probes import backends, probes_of
from sglang_pp_mla.geometry import Model
from sglang_pp_mla.model_class import ModelClass, find_model_class
from sglang_pp_mla.planner import TRITON
from sglang_pp_mla.releases import RELEASES, Span
from sglang_pp_mla.stage import Stage, default_partition, parse_partition
from sglang_pp_mla.weights import weights_of

if TYPE_CHECKING:
    from sglang_pp_mla.kernelfit import Gpu
    from sglang_pp_mla.rehearsal import EngineRun, Installation, Progress
    from sglang_pp_mla.rehearsal.examination import Examination

_Number = TypeVar("_Number", int, float)
_REMAINDER_LAST = Span("0.5.3", "0.5.5.post3")
_NEW_TOKENS = 2  # one by the prefill, one by a decode
_PROMPTS = ((3, 17, 42, 7, 99, 23, 5, 61), (11, 12, 13))
# SGLang's eight KV splits cost the interpreter a minute a token of 61 layers; so few tokens fill one.
_ON_CPU = {"triton_attention_num_kv_splits": 1}
_CLOSE = 1e-4
"""How far log-probabilities of float32 on one machine may be apart; a layer left out moves them by far more."""
# What SGLang is told where no GPU is named: capability, name, bytes.
_ANY_GPU = (9, 0, "NVIDIA H100 80GB HBM3", 80 << 30)


@dataclass(frozen=True)
class Verdict:
    """One line: ``status`` is pass, fail, warn or skip; ``ranks`` the stages it is about, none if it is about all.

    ``remedy`` is one sentence, empty where nothing is to be done.
    """

    id: str
    status: str
    summary: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()


class Missing(Exception):
    """What a check rests on is not there: the check is skipped. The message is a remedy, in one sentence."""


@dataclass(frozen=True)
class Check:
    """A check, its place in the order of cost, and what it does.

    ``run`` gives verdicts, at least one, whose ``id`` should be the check's; it may raise :class:`Missing`.
    Up to 19 nothing but the configuration is read, up to 29 SGLang's sources, from 30 on SGLang is run.
    """

    id: str
    order: int
    run: Callable[[Deployment], Iterable[Verdict]]


@dataclass
class Deployment:
    """What is to be served, and how. ``config`` is what the model's ``config.json`` holds.

    ``folder`` is the model's, if there is one; ``installation`` SGLang, None without it; ``disabled`` the value
    of ``SGLANG_PP_MLA_DISABLE``. ``rehearse`` runs the engine; ``on_progress`` is told its pipeline size and how
    far its stages are.
    """

    config: Mapping[str, Any]
    pp_size: int
    tp_size: int = 1
    partition: str | None = None
    backend: str = "triton_pp"
    gpu: Gpu | None = None
    sglang_args: str = ""
    rehearse: bool = False
    folder: Path | None = None
    installation: Installation | None = None
    disabled: str = ""
    on_progress: Callable[[int, Progress], None] | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    rehearsal: Rehearsal | None = None
    broken: str = ""
    """Why the installed SGLang could not be asked."""

    @cached_property
    def model(self) -> Model:
        try:
            return Model.from_config(self.config)
        except ValueError as error:
            raise Missing("Mend the configuration first.") from error

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        layers = self.model.num_layers
        try:
            if self.partition:
                return parse_partition(self.partition, layers, self.pp_size)
            return default_partition(layers, self.pp_size, remainder_last=self.release in _REMAINDER_LAST)
        except ValueError as error:
            raise Missing("Mend the partition first.") from error

    @property
    def release(self) -> str:
        """SGLang's, as installed; without it, the newest known."""
        return (self.installation.version if self.installation else None) or RELEASES[-1]

    @property
    def sglang(self) -> Path:
        """SGLang's folder."""
        if self.installation is None:
            raise Missing("Install SGLang for this Python (`python -m pip install sglang`) to have this checked.")
        return self.installation.folder

    @cached_property
    def model_class(self) -> ModelClass | None:
        return find_model_class(self.sglang, self.model.architecture)

    @property
    def resolved_backend(self) -> str:
        """The name in SGLang's registry."""
        return "triton" if self.backend == "triton_pp" else self.backend

    @cached_property
    def examination(self) -> Examination:
        """What the installed SGLang says of the arguments and the probes; one child for both."""
        from sglang_pp_mla.rehearsal import RehearsalError
        from sglang_pp_mla.rehearsal.examination import examine

        if self.broken:
            raise Missing("Mend SGLang's installation first.")
        assert self.sglang
        assert self.installation is not None
        attention = self.model.attention
        pool = (
            {"kv_lora_rank": attention.kv_lora_rank or 0, "qk_rope_head_dim": attention.qk_rope_head_dim or 0}
            if attention.is_mla
            else {"head_num": 1, "head_dim": attention.head_dim or 0}
        )
        try:
            return examine(
                self.installation,
                flags=self.flags,
                config=self.config,
                folder=self.folder,
                stages=self.stages,
                partition=self.partition,
                pool=pool,
                probes=probes_of(self.sglang, self.resolved_backend),
                gpu=_as_reported(self.gpu),
                gpus=self.pp_size * self.tp_size,
            )
        except RehearsalError as error:
            self.broken = str(error)
            raise Missing("Mend SGLang's installation first.") from error

    @property
    def flags(self) -> list[str]:
        """SGLang's flags, but for the model's path."""
        given = shlex.split(self.sglang_args)
        sizes = ["--pp-size", str(self.pp_size), "--tp-size", str(self.tp_size)]
        return [*sizes, "--attention-backend", self.backend, "--device", "cuda", *given]

    def flag(self, name: str, default: str) -> str:
        """The value of one of SGLang's flags, as given last."""
        words, value = self.flags, default
        for word, after in zip(words, [*words[1:], default], strict=True):
            if word == name:
                value = after
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
        return value

    def number(self, name: str, kind: Callable[[str], _Number]) -> _Number | None:
        """The value of a flag that takes a number; None if it is not given."""
        value = self.flag(name, "")
        try:
            return kind(value) if value else None
        except ValueError:
            raise ValueError(f"{name} {value} is not a number; mend it in --sglang-args.") from None


@dataclass(frozen=True)
class Rehearsal:
    """How the engine went on this CPU: seconds until ready, and the tokens of each prompt, staged and on one."""

    ready_s: float | None
    tokens: tuple[tuple[int, ...], ...]
    tokens_pp1: tuple[tuple[int, ...], ...]
    identical: bool


def run(deployment: Deployment, checks: Sequence[Check], on_verdict: Callable[[Verdict], None] | None = None) -> bool:
    """Run ``checks`` in their order, and say each verdict as it falls; whether none is a failure.

    The verdicts are in ``deployment.verdicts``. A check that raises is a warning of its own.
    """
    for check in sorted(checks, key=lambda check: check.order):
        try:
            verdicts = list(check.run(deployment))
        except Missing as missing:
            verdicts = [Verdict(check.id, "skip", "not looked at", str(missing))]
        except Exception as error:  # of another package's check, or of SGLang's source: the others still count
            verdicts = [
                Verdict(
                    check.id,
                    "warn",
                    f"the check itself failed ({type(error).__name__}: {error})",
                    "Report it with SGLang's release and the model's config.json.",
                )
            ]
        for verdict in verdicts:
            deployment.verdicts.append(verdict)
            if on_verdict is not None:
                on_verdict(verdict)
    return all(verdict.status != "fail" for verdict in deployment.verdicts)


# The configuration and the split


def check_configuration(deployment: Deployment) -> Iterable[Verdict]:
    """The configuration says all that is needed of its layers, the MLA widths among it."""
    try:
        model = Model.from_config(deployment.config)
    except ValueError as error:
        return [Verdict("configuration", "fail", str(error), "Give the config.json as the model's makers publish it.")]
    attention = model.attention
    kind = (
        f"MLA {attention.kv_lora_rank} + {attention.qk_rope_head_dim}"
        if attention.is_mla
        else f"no MLA, heads of {attention.head_dim}"
    )
    summary = (
        f"{model.architecture or model.model_type}: {model.num_layers} layers, {attention.num_heads} heads, {kind}"
    )
    if model.other_attention:
        remedy = (
            "Stages are judged by their full-attention layers alone; rehearse with the real weights before relying."
        )
        return [Verdict("configuration", "warn", f"{summary}; {model.other_attention}", remedy)]
    return [Verdict("configuration", "pass", summary)]


def check_partition(deployment: Deployment) -> Iterable[Verdict]:
    """Layer counts are whole, add up, and leave no stage empty."""
    layers = deployment.model.num_layers
    try:
        stages = deployment.stages
    except Missing as missing:
        what, _, remedy = str(missing.__cause__).partition("; ")
        return [Verdict("partition", "fail", what, remedy[:1].upper() + remedy[1:])]
    split = ",".join(str(len(stage.layers)) for stage in stages)
    named = "as given" if deployment.partition else "SGLang's own"
    return [Verdict("partition", "pass", f"{layers} layers over {len(stages)} stages: {split} ({named})")]


def check_heads(deployment: Deployment) -> Iterable[Verdict]:
    """Heads divide by the tensor-parallel size."""
    attention, tp_size = deployment.model.attention, deployment.tp_size
    if attention.num_heads % tp_size:
        sizes = [str(size) for size in range(1, attention.num_heads + 1) if attention.num_heads % size == 0]
        return [
            Verdict(
                "heads",
                "fail",
                f"{attention.num_heads} heads do not divide by --tp-size {tp_size}",
                f"Use a --tp-size of {', '.join(sizes[:-1])} or {sizes[-1]}." if sizes[1:] else "Use --tp-size 1.",
            )
        ]
    return [Verdict("heads", "pass", f"{attention.num_heads // tp_size} heads a rank")]


def check_memory(deployment: Deployment) -> Iterable[Verdict]:
    """The weights of every stage leave room for KV tokens on the named GPU, by SGLang's own arithmetic."""
    gpu, model, stages = deployment.gpu, deployment.model, deployment.stages
    if gpu is None or gpu.name == gpu.capability.name:
        return [Verdict("memory", "skip", "no GPU product is named", "Name it, as in --gpu 'RTX PRO 6000'.")]
    try:
        wanted = planner.Deployment(
            gpu_bytes=(gpu.memory * planner.GIB,) * len(stages),
            release=Version(deployment.release),
            tp_size=deployment.tp_size,
            attention_backend=deployment.backend,
            kv_cache_dtype=deployment.flag("--kv-cache-dtype", "auto"),
            mem_fraction_static=deployment.number("--mem-fraction-static", float),
            context=deployment.number("--context-length", int),
            max_running=deployment.number("--max-running-requests", int),
            multiprocessors=gpu.multiprocessors,
            page_size=deployment.number("--page-size", int) or 1,
        )
        weights = weights_of(model, deployment.folder, tp_size=deployment.tp_size, pp_size=deployment.pp_size)
        plan = planner.make_plan(model, weights, wanted, partition=[len(stage.layers) for stage in stages])
    except ValueError as error:
        return [Verdict("memory", "skip", str(error), "Watch max_total_num_tokens in the log as it starts.")]
    except planner.DoesNotFit as refusal:
        what, _, remedy = str(refusal).rpartition("; ")
        return [Verdict("memory", "fail", what, remedy[:1].upper() + remedy[1:], (refusal.rank,))]
    source = "the checkpoint's headers" if weights.measured else "the configuration"
    summary = f"{plan.kv_tokens:,} KV tokens on {gpu.name} of {gpu.memory} GB, weights by {source}"
    needed = wanted.context or 0
    if plan.kv_tokens < needed:
        remedy = "Have `sglang-pp-mla plan` find the partition, or lower --context-length."
        return [Verdict("memory", "warn", f"{summary}: fewer than one request of {needed:,}", remedy)]
    return [Verdict("memory", "pass", summary)]


# SGLang's sources


def check_architecture(deployment: Deployment) -> Iterable[Verdict]:
    """SGLang's class for the architecture takes part in a pipeline."""
    architecture, found = deployment.model.architecture, deployment.model_class
    if found is None:
        return [
            Verdict(
                "architecture",
                "warn",
                f"no class for {architecture} in SGLang's own models",
                "Serve it with a release that lists it, or rehearse what SGLANG_EXTERNAL_MODEL_PACKAGE brings.",
            )
        ]
    called = f"{found.name} ({found.file})"
    if found.name != architecture:
        called = f"{architecture} is not among SGLang's models; {called} serves it and"
    if found.takes_part is None:
        return [Verdict("architecture", "warn", f"{called} hides what its forward takes", "Rehearse it: --rehearse.")]
    if found.takes_part:
        return [Verdict("architecture", "pass", f"{called} takes part in a pipeline")]
    if deployment.pp_size == 1:
        return [Verdict("architecture", "pass", f"{called} takes no part in a pipeline, and there is none")]
    return [
        Verdict(
            "architecture",
            "fail",
            f"{called} takes no part in a pipeline (pp-unsupported-model)",
            f"Serve it with --pp-size 1 --tp-size {deployment.pp_size * deployment.tp_size}, or with a release whose "
            "class does.",
        )
    ]


def check_boundaries(deployment: Deployment) -> Iterable[Verdict]:
    """No stage begins where a layer needs the top-k indices of the one before, unless they travel too."""
    joined = deployment.model.joined_layers
    inside = [
        (stage, first, end) for stage in deployment.stages for first, end in joined if first < stage.start_layer < end
    ]
    if not joined:
        return [Verdict("boundaries", "pass", "any layer may begin a stage")]
    if not inside:
        return [Verdict("boundaries", "pass", "no stage begins within layers that share top-k indices")]
    ranks = tuple(stage.rank for stage, *_ in inside)
    found = deployment.model_class
    if found is not None and "topk_indices" in _string_keys(deployment.sglang / found.file):
        return [Verdict("boundaries", "pass", f"{found.name} hands the shared top-k indices on", ranks=ranks)]
    begins = ", ".join(
        f"PP{stage.rank} at layer {stage.start_layer} of {first}-{end - 1}" for stage, first, end in inside
    )
    return [
        Verdict(
            "boundaries",
            "fail",
            f"a stage begins within layers that share top-k indices, which do not travel: {begins}",
            "Begin each stage with a layer that has an indexer, as `sglang-pp-mla plan` does, or use SGLang 0.5.14.",
            ranks,
        )
    ]


def _string_keys(path: Path) -> set[str]:
    """Strings that stand alone in a source; what stages hand on is kept under such names."""
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8-sig", errors="replace")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def check_geometry(deployment: Deployment) -> Iterable[Verdict]:
    """The Triton decode kernel of the release takes this MLA geometry."""
    from sglang_pp_mla.fixes import mla_geometry
    from sglang_pp_mla.wiring.arming import is_disabled

    attention = deployment.model.attention
    if not attention.is_mla or deployment.flag("--decode-attention-backend", deployment.backend) not in TRITON:
        return []
    widths = f"{attention.kv_lora_rank} + {attention.qk_rope_head_dim}"
    fits = mla_geometry.key_tile_is_value_tile(attention.latent_width, attention.value_width)
    if fits or not mla_geometry.evidence(deployment.sglang):
        return [Verdict("mla-geometry", "pass", f"the decode kernel takes {widths}")]
    if is_disabled("mla-geometry", deployment.disabled):
        return [
            Verdict(
                "mla-geometry",
                "fail",
                f"the decode kernel of this release does not compile for {widths}: it dies on the first token",
                "Leave mla-geometry out of SGLANG_PP_MLA_DISABLE.",
            )
        ]
    return [
        Verdict("mla-geometry", "pass", f"the decode kernel does not compile for {widths}; repaired by mla-geometry")
    ]


# SGLang itself


def _as_reported(gpu: Gpu | None) -> tuple[int, int, str, int]:
    if gpu is None:
        return _ANY_GPU
    return (*divmod(gpu.capability.number, 10), f"NVIDIA {gpu.name}", gpu.memory << 30)


def check_arguments(deployment: Deployment) -> Iterable[Verdict]:
    """SGLang's own ``ServerArgs`` accept the flags."""
    from sglang_pp_mla.rehearsal.examination import has_its_code

    try:
        examination = deployment.examination
    except Missing:
        if not deployment.broken:
            raise
        return [Verdict("arguments", "fail", deployment.broken, "Look with `sglang-pp-mla doctor --deep`.")]
    if examination.refusal:
        return [
            Verdict(
                "arguments",
                "fail",
                f"SGLang refuses: {examination.refusal}",
                "Change the flag that it names: --backend, --sglang-args or a size.",
            )
        ]
    counts = tuple(len(stage.layers) for stage in deployment.stages)
    if examination.split != counts:
        split = ",".join(map(str, examination.split))
        return [
            Verdict(
                "arguments", "fail", f"SGLang splits the layers as {split}", f"Give that split: --partition {split}."
            )
        ]
    on = deployment.gpu.name if deployment.gpu else "an H100, since no --gpu is given"
    summary = f"SGLang accepts them, as on {on}"
    if not has_its_code(deployment.config, deployment.folder):
        remedy = "Give the model's folder to have its own code read, and SGLang --trust-remote-code when serving."
        return [Verdict("arguments", "pass", f"{summary}; without the model's own code, which is not here", remedy)]
    return [Verdict("arguments", "pass", summary)]


def check_probes(deployment: Deployment) -> Iterable[Verdict]:
    """What the backend asks the pool while it is built, asked of SGLang's real pools, stage by stage."""
    if deployment.resolved_backend not in backends(deployment.sglang):
        return [
            Verdict(
                "buffer-probe",
                "skip",
                f"{deployment.backend} is not in this SGLang's registry",
                "A backend of another package is repaired as any other; rehearse it to be sure.",
            )
        ]
    examination = deployment.examination
    if not examination.repairs(deployment.backend) and deployment.model.other_attention:
        remedy = "Rehearse with the real weights, or leave buffer-probe switched on."
        return [Verdict("buffer-probe", "skip", "the pools of such layers are not made here", remedy)]
    crash = [outcome for outcome in examination.probes if outcome.kind == "crash"]
    wrap = [outcome for outcome in examination.probes if outcome.kind == "wrap"]
    if not crash and not wrap:
        return [Verdict("buffer-probe", "pass", f"{deployment.backend} asks no stage for a layer it does not hold")]
    place = (crash or wrap)[0].place
    if examination.repairs(deployment.backend) and all(outcome.repaired for outcome in (*crash, *wrap)):
        ranks = tuple(sorted(outcome.rank for outcome in (*crash, *wrap)))
        summary = f"layer 0 is asked of stages that do not hold it ({place}); repaired by buffer-probe"
        return [Verdict("buffer-probe", "pass", summary, ranks=ranks)]
    remedy = (
        "Take buffer-probe out of SGLANG_PP_MLA_DISABLE."
        if deployment.disabled
        else ("Install this package with the Python that runs SGLang; `sglang-pp-mla doctor` says what is missing.")
    )
    found = []
    if wrap:
        got = ", ".join(f"PP{outcome.rank} layer {outcome.got_layer}" for outcome in wrap)
        summary = f"asked for layer 0 ({place}) the pool hands out another's buffer, silently: {got}"
        found.append(Verdict("buffer-probe", "fail", summary, remedy, tuple(outcome.rank for outcome in wrap)))
    if crash:
        summary = f"asked for layer 0 ({place}) the pool raises IndexError while the server starts"
        found.append(Verdict("buffer-probe", "fail", summary, remedy, tuple(outcome.rank for outcome in crash)))
    return sorted(found, key=lambda verdict: verdict.ranks)


def check_kernels(deployment: Deployment) -> Iterable[Verdict]:
    """The kernels that a rank launches compile, and fit the GPU."""
    from sglang_pp_mla.kernelfit import KernelFitError, Shapes, fit, serving
    from sglang_pp_mla.wiring.arming import is_disabled

    if deployment.gpu is None:
        return [
            Verdict("kernels", "skip", "no GPU is named", "Name it, as in --gpu 'RTX PRO 6000', to compile for it.")
        ]
    phases = ("--prefill-attention-backend", "--decode-attention-backend")
    others = {deployment.flag(phase, deployment.backend) for phase in phases} - {*TRITON}
    if others:
        return [Verdict("kernels", "skip", f"{' and '.join(sorted(others))} has no Triton kernels to compile")]
    assert deployment.sglang
    assert deployment.installation is not None
    try:
        shapes = Shapes.of_model(
            deployment.model,
            deployment.tp_size,
            kv_dtype=deployment.flag("--kv-cache-dtype", "auto"),
            page_size=deployment.number("--page-size", int) or 1,
        )
        kernels = fit(shapes, deployment.gpu, sglang=deployment.sglang, python=deployment.installation.python)
    except (ValueError, KernelFitError) as error:
        return [Verdict("kernels", "warn", str(error), "Compile them alone with `sglang-pp-mla kernelfit`.")]
    launched = serving(kernels, fixed=not is_disabled("mla-geometry", deployment.disabled))
    unfit = [kernel for kernel in launched if not kernel.fits]
    if not unfit:
        return [Verdict("kernels", "pass", f"{len(launched)} kernels compile and fit {deployment.gpu.name}")]
    return [
        Verdict("kernels", "fail", "; ".join(map(str, unfit)), "See `sglang-pp-mla kernelfit`, or use another backend.")
    ]


# The engine


def check_rehearsal(deployment: Deployment) -> Iterable[Verdict]:
    """The real engine, shrunk, over these stages and over one: the same tokens and log-probabilities."""
    if not deployment.rehearse:
        return [Verdict("rehearsal", "skip", "not asked for", "Add --rehearse to run the real engine on this CPU.")]
    if any(verdict.status == "fail" for verdict in deployment.verdicts):
        return [Verdict("rehearsal", "skip", "not held", "Mend what fails above first.")]
    if deployment.backend not in TRITON:
        return [Verdict("rehearsal", "skip", f"{deployment.backend} does not run on a CPU", "Rehearse with triton_pp.")]
    from sglang_pp_mla.rehearsal import shrink

    assert deployment.sglang
    try:
        config = shrink(dict(deployment.config))
    except ValueError as error:
        return [Verdict("rehearsal", "skip", str(error), "Serve it once on GPUs with the smallest --context-length.")]
    with tempfile.TemporaryDirectory(prefix="sglang-pp-mla-") as folder:
        weights = _write_weights(config, Path(folder))
        runs = [
            _run_engine(deployment, Path(folder), weights, pp_size)
            for pp_size in dict.fromkeys((deployment.pp_size, 1))
        ]
        staged, alone = runs[0], runs[-1]
    deployment.rehearsal = Rehearsal(
        staged.ready_s,
        tuple(answer.tokens for answer in staged.answers),
        tuple(answer.tokens for answer in alone.answers),
        identical=not staged.failed and not alone.failed and _same(staged, alone),
    )
    for pp_size, each in ((deployment.pp_size, staged), (1, alone)):
        if each.failed:
            ranks = () if each.rank is None else (each.rank,)
            remedy = "Run `sglang-pp-mla diagnose` on the log of the real server, or report the config.json."
            return [Verdict("rehearsal", "fail", f"with --pp-size {pp_size}: {each.error}", remedy, ranks)]
    if not deployment.rehearsal.identical:
        summary = f"{deployment.pp_size} stages answer otherwise than one"
        return [Verdict("rehearsal", "fail", summary, "Do not serve it with this split; report the config.json.")]
    count = sum(map(len, deployment.rehearsal.tokens))
    summary = f"{deployment.pp_size} stages were ready in {staged.ready_s:.0f} s and gave the {count} tokens of one"
    if weights:
        return [Verdict("rehearsal", "pass", summary)]
    return [
        Verdict("rehearsal", "warn", summary, "Weights too small to show every layer; it starts, and no more is shown.")
    ]


def _write_weights(config: dict[str, Any], folder: Path) -> bool:
    """Weights of real size, so that every layer shows in the answers, where there are any for the architecture."""
    from sglang_pp_mla.rehearsal.reference import write_model

    try:
        write_model(config, folder)
    except (ValueError, RuntimeError):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return False
    return True


def _run_engine(deployment: Deployment, folder: Path, weights: bool, pp_size: int) -> EngineRun:
    from sglang_pp_mla.rehearsal import FORK, run_engine

    assert deployment.installation is not None
    told = deployment.on_progress
    split = ",".join(str(len(stage.layers)) for stage in deployment.stages) if pp_size > 1 else None
    return run_engine(
        folder,
        _PROMPTS,
        pp_size=pp_size,
        partition=split,
        attention_backend=deployment.backend,
        python=deployment.installation.python,
        engine_args=_ON_CPU if weights else {**_ON_CPU, "load_format": "dummy"},
        env=FORK,
        max_new_tokens=_NEW_TOKENS,
        on_progress=None if told is None else lambda progress: told(pp_size, progress),
    )


def _same(one: EngineRun, other: EngineRun) -> bool:
    pairs = zip(one.answers, other.answers, strict=True)
    return all(
        a.tokens == b.tokens and all(abs(x - y) < _CLOSE for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in pairs
    )


BUILT_IN: tuple[Check, ...] = (
    Check("configuration", 10, check_configuration),
    Check("partition", 11, check_partition),
    Check("heads", 12, check_heads),
    Check("memory", 13, check_memory),
    Check("architecture", 20, check_architecture),
    Check("boundaries", 21, check_boundaries),
    Check("mla-geometry", 22, check_geometry),
    Check("arguments", 30, check_arguments),
    Check("buffer-probe", 40, check_probes),
    Check("kernels", 50, check_kernels),
    Check("rehearsal", 60, check_rehearsal),
)
"""This package's own checks. Others bring theirs through the hook ``sglang_pp_mla_checks``."""


def as_json(deployment: Deployment) -> dict[str, Any]:
    """What others may rely on: a check that concerns several ranks is there once for each, in their order."""
    try:
        stages = deployment.stages
    except Missing:
        stages = ()
    rehearsal = deployment.rehearsal
    return {
        "ok": all(verdict.status != "fail" for verdict in deployment.verdicts),
        "sglang": deployment.installation.version if deployment.installation else None,
        "backend": deployment.backend,
        "stages": [
            {"rank": stage.rank, "start_layer": stage.start_layer, "end_layer": stage.end_layer} for stage in stages
        ],
        "checks": [
            {
                "id": verdict.id,
                "status": verdict.status,
                "rank": rank,
                "summary": verdict.summary,
                "remedy": verdict.remedy,
            }
            for verdict in deployment.verdicts
            for rank in (verdict.ranks or (None,))
        ],
        "rehearsal": None
        if rehearsal is None
        else {
            "ready_s": rehearsal.ready_s,
            "tokens": [list(tokens) for tokens in rehearsal.tokens],
            "tokens_pp1": [list(tokens) for tokens in rehearsal.tokens_pp1],
            "identical": rehearsal.identical,
        },
    }
