"""Resolve SGLang's real arguments under both names of the backend; run as a program, in a process of its own.

``python resolve_arguments.py RESULT.json LINES.json`` imports SGLang once on a machine that it takes for one with
GPUs, then resolves the whole table in forks, one for each machine and spelling, so that whatever SGLang remembers
between two resolutions is the same for both names. SGLang's commands are asked for their help in further forks,
and in one more its parser is given LINES: arguments by a title, those of the documents.
The module itself imports only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import gc
import io
import json
import logging
import multiprocessing
import os
import pickle
import re
import runpy
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "data" / "models"
NOTE = "_sglang_pp_mla_asked_for_by"
BACKEND = "<the name under test>"

# Configurations that differ when the name is accepted but not translated, whatever the release.
TELLING = ("mla, prefill with triton", "mha, deterministic", "sinks on hopper")

# What a probe of the machine answers: compute capability and name, or nothing for a machine without a GPU.
MACHINES: dict[str, tuple[tuple[int, int], str] | None] = {
    "hopper": ((9, 0), "NVIDIA H100 80GB HBM3"),
    "blackwell": ((10, 0), "NVIDIA B200"),
    "workstation": ((12, 0), "NVIDIA RTX PRO 6000 Blackwell"),
    "cpu": None,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration: a model of ``tests/data/models`` and server arguments."""

    model: str
    machine: str
    arguments: dict[str, Any]

    def spelled(self, name: str) -> dict[str, Any]:
        common = {
            "model_path": str(MODELS / self.model),
            "device": "cpu" if self.machine == "cpu" else "cuda",
            "random_seed": 1,
            "port": 31000,
        }
        given = {key: name if value == BACKEND else value for key, value in self.arguments.items()}
        return {**common, **given}

    def fields(self) -> list[str]:
        """The arguments that hold the name under test."""
        return [key for key, value in self.arguments.items() if value == BACKEND]


def table() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    prefill, decode = "prefill_attention_backend", "decode_attention_backend"
    draft = "speculative_draft_attention_backend"

    def add(title: str, model: str, machine: str = "hopper", **arguments: Any) -> None:
        assert title not in cases, title
        if BACKEND not in arguments.values():
            arguments["attention_backend"] = BACKEND
        cases[title] = Case(model, machine, arguments)

    for model in ("mla", "mha", "linear", "sinks", "sliding"):
        add(f"{model} on hopper", model, "hopper")
        add(f"{model} on cpu", model, "cpu")
    for model in ("mla", "linear", "sinks"):
        add(f"{model} on blackwell", model, "blackwell")
    add("mla on workstation", "mla", "workstation")
    add("sinks on workstation", "sinks", "workstation")
    add("fp8 weights", "mla-fp8", "blackwell")
    add("sparse MLA", "sparse")
    add("sparse MLA on blackwell", "sparse", "blackwell")

    for model in ("mla", "mha"):
        for other in ("flashinfer", "fa3", "torch_native", "triton"):
            add(f"{model}, prefill with {other}", model, **{prefill: other, decode: BACKEND})
            add(f"{model}, decode with {other}", model, **{prefill: BACKEND, decode: other})
        add(f"{model}, both phases", model, **{prefill: BACKEND, decode: BACKEND})
        add(f"{model}, beside flashinfer", model, attention_backend="flashinfer", **{decode: BACKEND})
        add(f"{model}, deterministic", model, enable_deterministic_inference=True)
        add(f"{model}, deterministic, tp 2", model, enable_deterministic_inference=True, tp_size=2)
        add(f"{model}, without radix", model, disable_radix_cache=True)
        add(f"{model}, pp 2 tp 2", model, pp_size=2, tp_size=2)
        add(f"{model}, fp8 cache", model, kv_cache_dtype="fp8_e4m3")
        add(f"{model}, fp4 cache", model, "blackwell", kv_cache_dtype="fp4_e2m1")
        add(f"{model}, hierarchical cache", model, enable_hierarchical_cache=True)
        add(f"{model}, pages of 16", model, page_size=16)
        add(f"{model}, on policy", model, rl_on_policy_target="fsdp")
        add(f"{model}, CPU, pp 4", model, "cpu", pp_size=4, disable_cuda_graph=True)
    add("decode with flashmla", "mla", **{prefill: BACKEND, decode: "flashmla"})
    add("decode with flex_attention", "mha", **{prefill: BACKEND, decode: "flex_attention"})
    deterministic = {"enable_deterministic_inference": True}
    add("deterministic without radix", "mla", **deterministic, disable_radix_cache=True)
    add("deterministic sinks", "sinks", **deterministic)
    add("pp 4", "mla", pp_size=4)
    add("pp 2, chunked prefill", "mla", pp_size=2, chunked_prefill_size=2048)
    add("mixed chunks", "mla", enable_mixed_chunk=True)
    add("no chunked prefill", "mla", chunked_prefill_size=-1)
    add("no CUDA graph", "mla", disable_cuda_graph=True)
    add("fp8 e5m2 cache", "mla", kv_cache_dtype="fp8_e5m2")
    add("pages of 64", "mla", page_size=64)
    add("KV splits", "mla", triton_attention_num_kv_splits=16)
    add("split tile", "mla", triton_attention_split_tile_size=256)
    add("dp attention", "mla", tp_size=2, dp_size=2, enable_dp_attention=True)
    add("disaggregated prefill", "mla", disaggregation_mode="prefill", pp_size=2)
    add("disaggregated decode", "mla", disaggregation_mode="decode")
    add("two batches at once", "mla", enable_two_batch_overlap=True, tp_size=2, ep_size=2)
    add("linear without radix", "linear", disable_radix_cache=True)
    add("linear, extra buffer", "linear", mamba_scheduler_strategy="extra_buffer")
    add("linear, extra buffer, newer name", "linear", mamba_radix_cache_strategy="extra_buffer")
    add("linear, pp 2", "linear", pp_size=2, page_size=64)
    lora = {"enable_lora": True, "max_lora_rank": 16}
    add("LoRA", "mha", **lora, lora_target_modules=["q_proj", "v_proj"])
    add("LoRA, MLA", "mla", **lora, lora_target_modules=["o_proj"])
    add("LoRA, overlapped", "mha", **lora, lora_target_modules=["all"], enable_lora_overlap_loading=True)

    steps = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4, "speculative_eagle_topk": 1}
    tree = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 8, "speculative_eagle_topk": 4}
    eagle = {"speculative_algorithm": "EAGLE", **steps}
    small = {"speculative_draft_model_path": str(MODELS / "draft")}
    standalone = {"speculative_algorithm": "STANDALONE", **small, **steps}
    dflash = {"speculative_algorithm": "DFLASH", **small}
    add("NEXTN", "mla", speculative_algorithm="NEXTN", **steps)
    add("NEXTN, steps not given", "mla", speculative_algorithm="NEXTN")
    add("EAGLE, tree", "mla", speculative_algorithm="EAGLE", **tree)
    add("EAGLE, tree, pages of 64", "mla", speculative_algorithm="EAGLE", **tree, page_size=64)
    add("EAGLE, deterministic", "mla", **eagle, **deterministic)
    add("EAGLE, pp 2", "mla", **eagle, pp_size=2)
    add("EAGLE, mixed phases", "mla", **eagle, **{prefill: "flashinfer", decode: BACKEND})
    add("EAGLE, target and draft", "mla", **eagle, attention_backend=BACKEND, **{draft: BACKEND})
    add("EAGLE, draft beside fa3", "mla", **eagle, attention_backend="fa3", **{draft: BACKEND})
    add("EAGLE, fa3 draft", "mla", **eagle, attention_backend=BACKEND, **{draft: "fa3"})
    add("EAGLE3", "mha", speculative_algorithm="EAGLE3", **small, **steps)
    add("STANDALONE", "mha", **standalone)
    add("STANDALONE, draft", "mha", **standalone, **{draft: BACKEND})
    add("NGRAM", "mha", speculative_algorithm="NGRAM")
    add("NGRAM, pages of 16", "mha", speculative_algorithm="NGRAM", page_size=16)
    add("DFLASH", "mha", **dflash)
    add("DFLASH, draft", "mha", **dflash, attention_backend="flashinfer", **{draft: BACKEND})
    add("DFLASH, pp 2", "mha", **dflash, pp_size=2)
    return cases


# The machine


def pretend(machine: str) -> None:
    """Answer the probes that ask torch for the GPU. Nothing else is replaced."""
    import torch

    there = MACHINES[machine] is not None
    capability, name = MACHINES[machine] or ((0, 0), "none")
    memory = 80 << 30
    device = types.SimpleNamespace(
        major=capability[0], minor=capability[1], name=name, total_memory=memory, multi_processor_count=132
    )
    answers = {
        "is_available": there,
        "device_count": 8 if there else 0,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": name,
        "get_device_properties": device,
        "mem_get_info": (memory, memory),
    }
    for probe, answer in answers.items():
        setattr(torch.cuda, probe, lambda *_args, _answer=answer, **_kwargs: _answer)


def remembered() -> list[Any]:
    """The caches in which SGLang keeps what its probes were told."""
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    kept = []
    for cache in caches:
        probe = getattr(cache.__wrapped__, "func", cache.__wrapped__)
        if probe.__module__.startswith("sglang."):
            kept.append(cache)
    return kept


caches: list[Any] = []


def become(machine: str) -> None:
    """The first thing in a fork: a machine of its own."""
    pretend(machine)
    for cache in caches:
        cache.cache_clear()


# Resolution


def start_of_resolution(server_args_class: type) -> str:
    return "resolve_once" if hasattr(server_args_class, "resolve_once") else "__post_init__"


def resolve(arguments: dict[str, Any]) -> Any:
    """As the launchers do: build the record, resolve it, check it."""
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(**arguments)
    if hasattr(record, "resolve_once"):
        record.resolve_once()
    record.check_server_args()
    return record


def resolved_fields(record: Any) -> dict[str, Any]:
    return record.resolved_dict() if hasattr(record, "resolved_dict") else dataclasses.asdict(record)


def plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value as JSON has it, with everything that an object holds and no address of one."""
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value.removesuffix(f"_{os.getpid()}")  # the name of a temporary file
    if value is None or (isinstance(value, (bool, int, float)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (enum.Enum, Path, type)) or callable(value):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if id(value) in above:
        return f"<{type(value).__name__} again>"
    above = (*above, id(value))
    if isinstance(value, dict):
        return {str(key): plain(each, above) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, above) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(each, above)) for each in value)
    if hasattr(value, "__struct_fields__"):
        held = {name: getattr(value, name) for name in value.__struct_fields__}
    else:
        held = getattr(value, "__dict__", None)
    if held is None:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return {"class": type(value).__qualname__, **{name: plain(each, above) for name, each in held.items()}}


class Listener(logging.Handler):
    """Collects what SGLang says, without our own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("sglang_pp_mla"):
            self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    listener, root = Listener(), logging.getLogger()
    before = (root.handlers[:], root.level)
    root.handlers[:], root.level = [listener], logging.INFO
    try:
        yield listener
    finally:
        root.handlers[:], root.level = before


def outcome(arguments: dict[str, Any]) -> dict[str, Any]:
    """Everything that one resolution leaves: fields, other attributes, environment, log, or the refusal."""
    environment = dict(os.environ)
    result: dict[str, Any] = {}
    with listening() as listener:
        try:
            record = resolve(arguments)
        except Exception as error:
            result["refused"] = f"{type(error).__name__}: {error}"
        else:
            held = {name: value for name, value in vars(record).items() if name != NOTE}
            result["fields"] = plain(resolved_fields(record))
            result["held"] = plain({name: value for name, value in held.items() if name not in result["fields"]})
            result["note"] = getattr(record, NOTE, None)
            result["note_in_child"] = getattr(pickle.loads(pickle.dumps(record)), NOTE, None)
    result["log"] = listener.lines
    result["environment"] = {
        name: os.environ.get(name)
        for name in {*environment, *os.environ}
        if os.environ.get(name) != environment.get(name)
    }
    for name in result["environment"]:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
    return result


def resolve_table(work: tuple[str, str]) -> dict[str, Any]:
    """All cases of a machine in one spelling, in the order of the table."""
    machine, spelling = work
    become(machine)
    from sglang.srt.server_args import ServerArgs

    known = set(getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dataclass_fields__)
    if spelling == "untranslated":
        start = start_of_resolution(ServerArgs)
        setattr(ServerArgs, start, vars(ServerArgs)[start].__wrapped__)
    name = "triton" if spelling == "triton" else "triton_pp"
    return {
        title: outcome(case.spelled(name))
        for title, case in table().items()
        if case.machine == machine
        and known.issuperset(case.arguments)
        and (spelling != "untranslated" or title in TELLING)
    }


# The ways to give the name


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What a launcher gets for its arguments: the note of the resolved record, or the exit of SGLang's parser."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), listening():
            record = call()
            if hasattr(record, "resolve_once"):
                record.resolve_once()
        return {"note": getattr(record, NOTE, None), "backends": {f: resolved_fields(record)[f] for f in FLAGS}}
    except SystemExit as stop:
        return {"exit": stop.code, "said": said.getvalue()}


FLAGS = {
    "attention_backend": "--attention-backend",
    "prefill_attention_backend": "--prefill-attention-backend",
    "decode_attention_backend": "--decode-attention-backend",
    "speculative_draft_attention_backend": "--speculative-draft-attention-backend",
}


def ways(_: object) -> dict[str, Any]:
    become("hopper")
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    model = ["--model-path", str(MODELS / "mla"), "--device", "cuda"]
    found = {
        f"{flag} {name}": attempt(functools.partial(prepare_server_args, [*model, flag, name]))
        for name in ("triton_pp", "triton_pq")
        for flag in FLAGS.values()
    }
    found["keyword"] = attempt(
        lambda: ServerArgs(model_path=str(MODELS / "mla"), device="cuda", attention_backend="triton_pp")
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in ("triton_pp", "triton_pq"):
            file = Path(folder, f"{name}.yaml")
            file.write_text(f"attention-backend: {name}\npp-size: 2\n")
            found[f"--config {name}"] = attempt(lambda f=file: prepare_server_args([*model, "--config", str(f)]))
    return found


COMMANDS = ("python -m sglang.launch_server", "sglang serve")


def help_of(command: str) -> str:
    """What one of SGLang's own commands prints for ``--help``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        if command == "sglang serve":
            script = Path(sys.executable).with_name("sglang")
            sys.argv = [str(script), "serve", "--help"]
            runpy.run_path(str(script), run_name="__main__")
        else:
            sys.argv = ["launch_server", "--help"]
            runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    return printed.getvalue()


def parse_lines(lines: dict[str, list[str]]) -> dict[str, Any]:
    """What SGLang's parser says against each of these lines, nothing where it takes it, and all flags that it has."""
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ModuleNotFoundError:  # where older releases have it
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    merge = ConfigArgumentMerger(parser).merge_config_with_args
    refused = {}
    for title, arguments in lines.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                parser.parse_args(merge(arguments) if "--config" in arguments else arguments)
        except SystemExit as stop:
            if stop.code:  # 0 is --help's
                refused[title] = said.getvalue()
    return {"refused": refused, "flags": list(parser._option_string_actions)}


def main(path: str, lines: str) -> None:
    pretend("hopper")
    import msgspec
    import sglang.srt.configs.model_config
    import sglang.srt.server_args  # noqa: F401

    # Worked out anew on every call, a third of the time of a resolution, and never any different.
    msgspec.structs.fields = functools.cache(msgspec.structs.fields)
    caches[:] = remembered()
    gc.freeze()  # a collection in a fork would copy all of this process's memory
    work = [(machine, spelling) for machine in MACHINES for spelling in ("triton", "triton_pp")]
    work.append(("hopper", "untranslated"))
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        spelled = pool.map_async(ways, [None], chunksize=1)
        printed = pool.map_async(help_of, COMMANDS, chunksize=1)
        parsed = pool.map_async(parse_lines, [json.loads(Path(lines).read_text())])
        resolved = pool.map(resolve_table, work, chunksize=1)
        answer: dict[str, Any] = {
            "ways": spelled.get()[0],
            "help": dict(zip(COMMANDS, printed.get(), strict=True)),
            "lines": parsed.get()[0],
            "cases": {},
        }
    for (_machine, spelling), outcomes in zip(work, resolved, strict=True):
        for title, each in outcomes.items():
            answer["cases"].setdefault(title, {})[spelling] = each
    Path(path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
