#!/usr/bin/env python3
"""The whole engine, no GPU: a tiny MLA model over pipeline stages dies while it starts, or serves.

    python repro_engine.py                           7 layers as 4 + 3, --attention-backend triton
    python repro_engine.py --layers 61 --pp-size 8   Kimi K2.6's layers over 8 stages (minutes)

Starts `sglang.Engine` on the CPU with dummy weights and a DeepseekV3 configuration whose attention
geometry is the real one (kv_lora_rank 512, rope 64) and whose other sizes are tiny. On SGLang to 0.5.17
every later stage's attention backend asks its KV pool for layer 0: with 4 + 3 layers, stage 1 dies with
`IndexError` in `get_value_buffer`. buffer-probe/repro.py shows the same without an engine, in seconds.

Real: everything of SGLang, its processes and its kernels (in Triton's interpreter). Replaced: sgl_kernel,
whose CUDA build cannot be loaded without a driver; the CPU path calls nothing in it.

Exit status: 0 it generated tokens; 1 it died of the IndexError; 2 wrong input; 3 anything else (time ran
out, another error). No process is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import uuid
from pathlib import Path

SERVED, DIED, WRONG_INPUT, INCONCLUSIVE = 0, 1, 2, 3
MARKER = "SGLANG_REPRO_ENGINE"
TOKENS_LINE = "REPRO_TOKENS "
PROMPT = [1, 2, 3, 4, 5, 6, 7]


# --- In the engine's processes ---------------------------------------------------------------------


class Placeholder(types.ModuleType):
    """Stands for sgl_kernel and anything in it; enough for import statements, useless for computing."""

    __path__: list = []
    __all__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a placeholder: its library is not available here")


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


if MARKER in os.environ:
    # At the top of the file: the engine's spawned processes import it before anything of SGLang.
    sys.meta_path.insert(0, PlaceholderFinder())


def serve(settings: dict) -> None:
    """Start the engine and generate; what is printed is read by the process that watches."""
    import sglang

    print(f"REPRO_SGLANG {sglang.__version__}", flush=True)
    engine = sglang.Engine(**settings)
    answer = engine.generate(
        input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    )
    print(TOKENS_LINE + json.dumps(answer["output_ids"]), flush=True)
    engine.shutdown()


# --- In the process that watches -------------------------------------------------------------------


def write_model(folder: Path, layers: int) -> None:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "float32",
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "vocab_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        # The CPU path of the rotary embedding asserts that there is one.
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")


def engine_settings(folder: Path, args) -> dict:
    return {
        "model_path": str(folder),
        "attention_backend": args.attention_backend,
        "pp_size": args.pp_size,
        "tp_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 512,
        "max_running_requests": 4,
        "context_length": 128,
        "mem_fraction_static": 0.3,
        "chunked_prefill_size": -1,
        "log_level": "info",
    }


def engine_environment(args, marker: str) -> dict:
    environment = dict(os.environ)
    environment.pop("SGLANG_PP_LAYER_PARTITION", None)
    # Without bytecode on disk every process compiles all of SGLang and torch anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.update(
        {
            MARKER: marker,
            # SGLang names its processes, which otherwise wipes /proc/PID/environ and the marker in it.
            "SPT_NOENV": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            # The pipeline's process group then uses Gloo.
            "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
            "HF_HUB_OFFLINE": "1",
        }
    )
    if args.partition:
        environment["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, args.partition))
    if counts_every_rank():
        cpus = sorted(os.sched_getaffinity(0))
        sets = (str(cpus[rank * len(cpus) // args.pp_size]) for rank in range(args.pp_size))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(sets)
    return environment


def counts_every_rank() -> bool:
    """Whether this SGLang wants a CPU set for each pipeline rank; earlier ones count tensor ranks only."""
    source = sglang_folder() / "srt" / "utils" / "numa_utils.py"
    return source.exists() and "pp_size" in source.read_text()


def sglang_folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    return Path(spec.submodule_search_locations[0])


def run_engine(args) -> tuple[str, bool]:
    """The engine's whole output, and whether its time ran out."""
    marker = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.layers)
        log = folder / "log"
        # Files rather than pipes: children that outlive the engine would hold a pipe open.
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, "--serve", json.dumps(engine_settings(folder, args))],
                env=engine_environment(args, marker),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        expired = False
        try:
            expired = not wait(process, log, args)
        finally:
            kill_marked(marker)
            process.wait()
        return log.read_text(errors="replace"), expired


def wait(process, log: Path, args) -> bool:
    """Until the engine ends, has answered, or a stage has died; False when time runs out first."""
    began = last_note = time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        text = log.read_text(errors="replace")
        if TOKENS_LINE in text:
            return True
        if crash(text):
            # A moment for the other stages' tracebacks.
            time.sleep(3)
            return True
        if now - began > args.timeout:
            return False
        if now - last_note >= 15:
            last_note = now
            print(f"... {now - began:.0f} s", file=sys.stderr, flush=True)
    return True


def kill_marked(marker: str) -> None:
    """End everything this run started: a dying engine can leave children behind, reparented."""
    wanted = f"{MARKER}={marker}".encode()
    deadline = time.monotonic() + 10
    while (found := list(marked(wanted))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def marked(wanted: bytes):
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


# --- The report ------------------------------------------------------------------------------------


CRASH = re.compile(
    r"^(?P<prefix>\[[^\]\n]*\]) Scheduler hit an exception: "
    r"(?P<trace>Traceback[^\n]*\n(?:[ \t][^\n]*\n)+(?P<error>\S[^\n]*))",
    re.MULTILINE,
)


def crash(text: str) -> re.Match | None:
    return CRASH.search(text)


def is_the_fault(match: re.Match) -> bool:
    trace = match["trace"]
    return match["error"].startswith("IndexError") and "in get_value_buffer" in trace


def pp_rank(match: re.Match) -> str:
    found = re.search(r"\bPP(\d+)", match["prefix"])
    return f"PP{found[1]}" if found else "a stage"


def report(args, text: str, expired: bool) -> int:
    release = re.search(r"^REPRO_SGLANG (.*)$", text, re.MULTILINE)
    split = f" as {'+'.join(map(str, args.partition))}" if args.partition else ""
    print(
        f"SGLang {release[1] if release else '?'}, {args.attention_backend} backend, "
        f"{args.layers} layers over {args.pp_size} stages{split}, on the CPU"
    )
    tokens = re.search(rf"^{TOKENS_LINE}(.*)$", text, re.MULTILINE)
    if tokens:
        print(f"SERVES: tokens {tokens[1]}")
        return SERVED
    found = list(CRASH.finditer(text))
    faults = [match for match in found if is_the_fault(match)]
    if faults:
        ranks = sorted({pp_rank(match) for match in faults})
        print(f"DIES while it starts, on {', '.join(ranks)}; {pp_rank(faults[0])}'s traceback ends:\n")
        print("\n".join(faults[0]["trace"].splitlines()[-8:]))
        return DIED
    print("No answer within the time allowed." if expired else "The engine ended for another reason.")
    lines = found[0]["trace"].splitlines() if found else text.splitlines()
    # One line of a log can be thousands of characters of settings.
    print("\n".join(line[:300] for line in lines[-25:]))
    return INCONCLUSIVE


class OneSentence(argparse.ArgumentParser):
    def error(self, message):
        self.exit(WRONG_INPUT, f"{self.prog}: {message}.\n")


def shares(text: str) -> list[int]:
    try:
        partition = [int(share) for share in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer counts such as 4,3") from None
    if min(partition) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} leaves a stage without layers")
    return partition


def parse(argv):
    parser = OneSentence(description="Does a tiny MLA model serve over pipeline stages, on the CPU?")
    parser.add_argument("--partition", type=shares, metavar="4,3", help="layers of each stage (default: 4,3)")
    parser.add_argument("--layers", type=int, help="layers of the model, split as SGLang splits them")
    parser.add_argument("--pp-size", type=int, help="number of stages")
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.partition is None and args.layers is None and args.pp_size is None:
        args.partition = [4, 3]
    if args.partition:
        if args.layers not in (None, sum(args.partition)):
            parser.error(f"--partition adds up to {sum(args.partition)} layers, --layers says {args.layers}")
        if args.pp_size not in (None, len(args.partition)):
            parser.error(f"--partition has {len(args.partition)} stages, --pp-size says {args.pp_size}")
        args.layers, args.pp_size = sum(args.partition), len(args.partition)
    elif args.layers is None or args.pp_size is None:
        parser.error("--layers and --pp-size go together")
    elif not 1 <= args.pp_size <= args.layers:
        parser.error(f"{args.layers} layers cannot be split over {args.pp_size} stages")
    if importlib.util.find_spec("sglang") is None:
        parser.error("sglang is not installed in this Python environment")
    return args


def main(argv=None) -> int:
    args = parse(argv)
    if args.serve:
        serve(args.serve)
        return SERVED
    text, expired = run_engine(args)
    return report(args, text, expired)


if __name__ == "__main__":
    sys.exit(main())
