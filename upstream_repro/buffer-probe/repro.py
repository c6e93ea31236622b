#!/usr/bin/env python3
"""Pipeline stages: attention backends ask the KV pool for layer 0, which later stages do not hold.

    python repro.py                                  three demonstrations, seconds, no GPU
    python repro.py --partition 4,3                  one split of your own
    python repro.py --layers 61 --pp-size 8          SGLang's own split of 61 layers over 8
    python repro.py --backend wave|aiter --kv mha    other backends, other pool

Some backends learn a head size with `token_to_kv_pool.get_value_buffer(0)`. A stage's pool holds only
layers [start, start + n) and indexes them as `layer_id - start`, so the index is -start:

    start > n         IndexError: the server dies while it starts
    0 < start <= n    Python wraps the index: the backend silently reads some other layer's buffer
                      (at start == n that happens to be the stage's own first layer)

What is real: the installed SGLang's pool, its attention backend, its ModelRunner's method that builds
the backend, its split of the layers, its ServerArgs and ModelConfig. What stands in: the runner (a
ModelRunner whose __init__ did not run, so no weights), and GPU libraries that cannot be imported here
(sgl_kernel; wave_lang for --backend wave; vllm, which releases to 0.5.7 import). All stages are built in
one process.

Exit status: 0 no stage asks for a layer it does not hold; 1 one does; 2 wrong input; 3 the backend could
not be built here for another reason, so nothing is known.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path

CLEAN, FAULT, WRONG_INPUT, INCONCLUSIVE = 0, 1, 2, 3
TOKENS = 16
DEMONSTRATIONS = (
    ("IndexError on stage 1: an uneven split, the larger share first", 7, 2, [4, 3]),
    ("IndexError on later stages: 61 layers over 8 in SGLang's own split", 61, 8, None),
    ("silent wrap: the larger share last, stage 1 reads a buffer that is not its first", 7, 2, [3, 4]),
)


# --- GPU libraries that cannot be imported without their GPU ---------------------------------------


class Placeholder(types.ModuleType):
    """Stands for a module or anything in it; enough for import statements, useless for computing."""

    __path__: list = []
    __all__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __truediv__(self, other):
        # WaveAttnBackend computes a per-worker directory from wave_lang's cache directory.
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a placeholder: its library is not available here")


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


def wants_vllm() -> bool:
    """To 0.5.7 SGLang on a CPU imports vllm's activations, used or not, and does not require vllm."""
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    activation = Path(folder, "srt", "layers", "activation.py")
    return "from vllm." in activation.read_text() and importlib.util.find_spec("vllm") is None


def run_without_gpu(backend: str) -> list[str]:
    """Set up this process for a CPU; returns the libraries that are replaced."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
        SGLANG_USE_CPU_ENGINE="1",
        SGLANG_NCCL_SO_PATH="/nonexistent.so",
    )
    # Ours to set, per split.
    os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)
    replaced = ["sgl_kernel"]
    if backend == "wave" and importlib.util.find_spec("wave_lang") is None:
        replaced.append("wave_lang")
    if wants_vllm():
        replaced.append("vllm")
    sys.meta_path.insert(0, PlaceholderFinder(set(replaced)))
    return replaced


# --- What the release builds for one stage ---------------------------------------------------------


def model_folder(folder: Path, kv: str, layers: int) -> str:
    """A tiny model configuration; only its attention geometry and its layer count matter."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "max_position_embeddings": 64,
        "vocab_size": 128,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    if kv == "mla":
        config |= {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            # 16 heads: AITER's MLA path accepts few other counts.
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
    else:
        config |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
        }
    path = folder / f"{kv}-{layers}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text("{}")
    return str(path)


class Release:
    """The installed SGLang, set up as a process that is about to build attention backends."""

    def __init__(self, folder: Path, backend: str, kv: str):
        self.folder, self.backend, self.kv = folder, backend, kv

    def configure(self, layers: int):
        """Real arguments and a real model configuration, published as a scheduler would."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.server_args import ServerArgs

        server_args = ServerArgs(
            model_path=model_folder(self.folder, self.kv, layers),
            device="cpu",
            dtype="float32",
            attention_backend=self.backend,
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            page_size=1,
            mem_fraction_static=0.3,
            chunked_prefill_size=-1,
        )
        with contextlib.suppress(ImportError):  # 0.5.3 and 0.5.3.post1 have none
            from sglang.srt.server_args import set_global_server_args_for_scheduler

            set_global_server_args_for_scheduler(server_args)
        self.init_process_groups(server_args)
        model_config = ModelConfig.from_server_args(server_args)
        self.init_attention_group(server_args, model_config)
        return server_args, model_config

    def init_process_groups(self, server_args):
        """Groups of one rank. Which stage is built is a matter of the pool, not of the groups."""
        import torch
        from sglang.srt.distributed import parallel_state

        self.publish_rank(server_args)
        if torch.distributed.is_initialized():
            return
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{self.folder / 'rendezvous'}",
        )
        parallel_state.initialize_model_parallel()

    def init_attention_group(self, server_args, model_config):
        """To 0.5.9 backends learn their share of the heads from a group of its own."""
        from sglang.srt.layers import dp_attention

        if getattr(dp_attention, "_ATTN_TP_SIZE", 1) is None:
            dp_attention.initialize_dp_attention(server_args, model_config)

    def publish_rank(self, server_args):
        """Newer releases take their ranks from the launcher, not from the groups."""
        with contextlib.suppress(ImportError):
            from sglang.srt.runtime_context import SpawnRanks, publish

            publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))

    def split(self, layers: int, pp_size: int, partition):
        """[start, end) of every stage, as SGLang computes it."""
        from sglang.srt.distributed.utils import get_pp_indices

        if partition:
            os.environ["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, partition))
        try:
            return [get_pp_indices(layers, rank, pp_size) for rank in range(pp_size)]
        finally:
            os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)

    def pool(self, model_config, start: int, end: int):
        import torch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

        common = {
            "size": TOKENS,
            "page_size": 1,
            "dtype": torch.float32,
            "layer_num": end - start,
            "device": "cpu",
            "enable_memory_saver": False,
            "start_layer": start,
            "end_layer": end,
        }
        if self.kv == "mla":
            return MLATokenToKVPool(
                **common,
                kv_lora_rank=model_config.kv_lora_rank,
                qk_rope_head_dim=model_config.qk_rope_head_dim,
            )
        return MHATokenToKVPool(**common, head_num=model_config.get_num_kv_heads(1), head_dim=model_config.head_dim)

    def runner(self, server_args, model_config, pool):
        """The one stand-in: a ModelRunner that was never initialised, given what builders read."""
        import torch
        from sglang.srt.mem_cache import allocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = ModelRunner.__new__(ModelRunner)
        attributes = {
            "server_args": server_args,
            "model_config": model_config,
            "model": None,
            "device": "cpu",
            "gpu_id": 0,
            "tp_rank": 0,
            "tp_size": 1,
            "ps": types.SimpleNamespace(tp_rank=0, tp_size=1),
            "dtype": torch.float32,
            "kv_cache_dtype": torch.float32,
            "page_size": 1,
            "sliding_window_size": None,
            "use_mla_backend": self.kv == "mla",
            "is_hybrid": None,
            "is_hybrid_swa": False,
            "is_draft_worker": False,
            "draft_attention_backend": None,
            "spec_algorithm": SpeculativeAlgorithm.NONE,
            "spec_aux_config": types.SimpleNamespace(
                eagle_use_aux_hidden_state=False,
                eagle_aux_hidden_state_layer_ids=None,
                dflash_use_aux_hidden_state=False,
                dflash_target_layer_ids=None,
                is_dspark=False,
            ),
            "eagle_use_aux_hidden_state": False,
            "dflash_use_aux_hidden_state": False,
            "_linear_attn_registry_cache": None,
            "start_layer": pool.start_layer,
            "end_layer": pool.start_layer + pool.layer_num,
            "num_effective_layers": pool.layer_num,
            "req_to_token_pool": ReqToTokenPool(size=2, max_context_len=64, device="cpu", enable_memory_saver=False),
            "token_to_kv_pool": pool,
            "token_to_kv_pool_allocator": allocator.TokenToKVPoolAllocator(
                TOKENS, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False
            ),
        }
        for name, value in attributes.items():
            # Some of these are computed by a property in some releases.
            with contextlib.suppress(AttributeError):
                setattr(runner, name, value)
        if hasattr(ModelRunner, "init_kv_index_translator"):
            ModelRunner.init_kv_index_translator(runner)
        return runner

    def build_backend(self, runner):
        """Through the runner's own method and the registry, as a server does at start-up."""
        from sglang.srt.model_executor.model_runner import ModelRunner

        for name in ("init_attention_backends", "init_attention_backend"):
            if hasattr(ModelRunner, name):
                return getattr(ModelRunner, name)(runner)
        raise RuntimeError("this SGLang's ModelRunner builds its attention backend in an unknown place")


# --- Observation -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Probe:
    asked: int
    got_layer: int | None = None
    error: str | None = None


@contextlib.contextmanager
def observed(pool):
    """Record what is asked of the pool and which layer's memory it hands out; changes no answer."""
    original = type(pool).get_value_buffer
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.v_buffer
    layer_at = {buffer.data_ptr(): pool.start_layer + i for i, buffer in enumerate(buffers)}
    probes: list[Probe] = []

    def get_value_buffer(self, layer_id, *args, **kwargs):
        probe = Probe(layer_id)
        probes.append(probe)
        try:
            buffer = original(self, layer_id, *args, **kwargs)
        except IndexError as error:
            probe.error = f"IndexError: {error}"
            raise
        probe.got_layer = layer_at[buffer.data_ptr()]
        return buffer

    # On the class and only meanwhile, so that whoever looks at the pool sees an ordinary one.
    type(pool).get_value_buffer = get_value_buffer
    try:
        yield probes
    finally:
        type(pool).get_value_buffer = original


@dataclasses.dataclass
class Stage:
    stage: int
    start_layer: int
    end_layer: int
    asked: int | None = None
    # none: nothing asked. own: a layer of the stage's own. wrap: a layer it does not hold, answered with
    # `got_layer`'s buffer. IndexError: a layer it does not hold, refused.
    outcome: str = "none"
    got_layer: int | None = None
    v_head_dim: int | None = None
    error: str | None = None

    @property
    def faulty(self) -> bool:
        return self.outcome in ("wrap", "IndexError")


def examine_stage(release: Release, server_args, model_config, rank: int, start: int, end: int) -> Stage:
    stage = Stage(rank, start, end)
    pool = release.pool(model_config, start, end)
    runner = release.runner(server_args, model_config, pool)
    with observed(pool) as probes:
        try:
            release.build_backend(runner)
        except IndexError as error:
            if not (probes and probes[-1].error):
                raise
            stage.error = f"IndexError: {error}"
    stage.v_head_dim = getattr(getattr(runner, "attn_backend", None), "v_head_dim", None)
    if probes:
        outside = [probe for probe in probes if not start <= probe.asked < end]
        told = (outside or probes)[-1]
        stage.asked, stage.got_layer = told.asked, told.got_layer
        stage.outcome = "IndexError" if told.error else "wrap" if outside else "own"
    return stage


# --- The report ------------------------------------------------------------------------------------


def describe(stage: Stage) -> str:
    if stage.outcome == "none":
        return "nothing asked of the pool"
    if stage.outcome == "IndexError":
        return stage.error or "IndexError"
    if stage.outcome == "own":
        return f"its own layer {stage.got_layer}"
    if stage.got_layer == stage.start_layer:
        return f"WRAPS, by luck to its own first layer {stage.got_layer}"
    return f"WRAPS to layer {stage.got_layer}; its first is {stage.start_layer}"


def print_table(title: str, stages: list[Stage]) -> None:
    print(f"\n{title}")
    print(f"  {'stage':>5}  {'layers':<7}  {'asked for':<9}  got")
    for stage in stages:
        layers = f"{stage.start_layer}-{stage.end_layer - 1}"
        asked = "-" if stage.asked is None else f"layer {stage.asked}"
        print(f"  {stage.stage:>5}  {layers:<7}  {asked:<9}  {describe(stage)}")


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
    parser = OneSentence(
        description="Does an attention backend ask a pipeline stage's KV pool for a layer it lacks?",
        epilog="Without --partition, --layers and --pp-size: three demonstrations.",
    )
    parser.add_argument("--backend", choices=("triton", "aiter", "wave"), default="triton")
    parser.add_argument("--kv", choices=("mla", "mha"), help="pool (default: mla; mha for aiter)")
    parser.add_argument("--partition", type=shares, metavar="4,3", help="layers of each stage")
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--pp-size", type=int, help="number of stages")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args(argv)
    # AITER takes an MLA model's head size from its configuration and asks the pool only for others.
    args.kv = args.kv or ("mha" if args.backend == "aiter" else "mla")
    if args.partition:
        if args.layers not in (None, sum(args.partition)):
            parser.error(f"--partition adds up to {sum(args.partition)} layers, --layers says {args.layers}")
        if args.pp_size not in (None, len(args.partition)):
            parser.error(f"--partition has {len(args.partition)} stages, --pp-size says {args.pp_size}")
        args.layers, args.pp_size = sum(args.partition), len(args.partition)
    elif (args.layers is None) != (args.pp_size is None):
        parser.error("--layers and --pp-size go together")
    elif args.layers is not None and not 1 <= args.pp_size <= args.layers <= 1000:
        parser.error(f"{args.layers} layers cannot be split over {args.pp_size} stages")
    if importlib.util.find_spec("sglang") is None:
        parser.error("sglang is not installed in this Python environment")
    return args


def demonstrations(args):
    if args.layers is None:
        return DEMONSTRATIONS
    return ((f"{args.layers} layers over {args.pp_size} stages", args.layers, args.pp_size, args.partition),)


def examine(args) -> list[tuple[str, list[Stage]]]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        release = Release(Path(folder), args.backend, args.kv)
        for title, layers, pp_size, partition in demonstrations(args):
            server_args, model_config = release.configure(layers)
            split = release.split(layers, pp_size, partition)
            stages = [
                examine_stage(release, server_args, model_config, rank, start, end)
                for rank, (start, end) in enumerate(split)
            ]
            results.append((title, stages))
    return results


def report(args, replaced, results) -> int:
    import sglang

    faulty = [stage for _, stages in results for stage in stages if stage.faulty]
    if args.json:
        summary = {
            "sglang": sglang.__version__,
            "backend": args.backend,
            "kv": args.kv,
            "replaced": replaced,
            "fault": bool(faulty),
            "demonstrations": [
                {"title": title, "stages": [dataclasses.asdict(stage) for stage in stages]} for title, stages in results
            ],
        }
        print(json.dumps(summary, indent=2))
        return FAULT if faulty else CLEAN
    print(f"SGLang {sglang.__version__}, {args.backend} backend, {args.kv.upper()} pool, on the CPU")
    for title, stages in results:
        print_table(title, stages)
    if faulty:
        print(f"\nFAULT: {len(faulty)} stage(s) asked their pool for a layer they do not hold.")
        return FAULT
    print("\nClean: no stage asked its pool for a layer it does not hold.")
    return CLEAN


def main(argv=None) -> int:
    args = parse(argv)
    replaced = run_without_gpu(args.backend)
    try:
        # SGLang and AITER's import guard print; standard output is for the report.
        with contextlib.redirect_stdout(sys.stderr):
            logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
            # Import-time notes that this is not a GPU machine.
            warnings.simplefilter("ignore")
            results = examine(args)
    except Exception as error:
        logging.getLogger(__name__).debug("", exc_info=True)
        place = inspect.trace()[-1]
        print(
            f"{args.backend} could not be built here, so nothing is known: {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno})",
            file=sys.stderr,
        )
        return INCONCLUSIVE
    return report(args, replaced, results)


if __name__ == "__main__":
    sys.exit(main())
