"""The child that :mod:`.examination` asks. Runs by path; reads a question from standard input, prints an answer.

First the arguments: SGLang is imported as on a machine with the GPU in question, whose probes of it are answered
here, and resolves them in a fork. Then, as on a CPU, which it is, SGLang's own pools are made, a few tokens each.
"""

import functools
import gc
import inspect
import io
import json
import os
import sys
import types
from contextlib import nullcontext, redirect_stderr
from typing import Any

_POOL_TOKENS = 8


def pretend(gpu: "list[Any] | None", gpus: int) -> None:
    """Answer the probes that ask torch for a GPU; None takes it away again. Nothing else is replaced."""
    import torch

    major, minor, name, memory = gpu or (0, 0, "none", 0)
    device = types.SimpleNamespace(
        major=major, minor=minor, name=name, total_memory=memory, multi_processor_count=132, gcnArchName=""
    )
    answers = {
        "is_available": gpu is not None,
        "device_count": gpus if gpu else 0,
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_name": name,
        "get_device_properties": device,
        "mem_get_info": (memory, memory),
    }
    for probe, answer in answers.items():
        setattr(torch.cuda, probe, lambda *_args, _answer=answer, **_kwargs: _answer)
    # What SGLang has been told, it remembers.
    for cache in [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]:
        cached: Any = getattr(cache.__wrapped__, "func", cache.__wrapped__)
        if str(getattr(cached, "__module__", "")).startswith("sglang."):
            cache.cache_clear()


def refusal_of(flags: "list[str]") -> str:
    """SGLang's own message if it refuses the flags, as its launchers parse, resolve and check them."""
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            record = prepare_server_args(flags)
            if hasattr(record, "resolve_once"):
                record.resolve_once()
            record.check_server_args()
    except SystemExit:
        return _one_line(said.getvalue().rpartition("error: ")[2] or "the parser ended")
    except Exception as error:
        return _one_line(str(error)) or type(error).__name__
    return ""


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:400] + "…"


def in_a_fork(call: Any, *arguments: Any) -> Any:
    """The answer of a call that leaves its traces, in the environment and in SGLang, to nobody."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(call(*arguments))
            with os.fdopen(write, "w") as stream:
                stream.write(answer)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else "the process that resolved the arguments died"


def make_pool(shape: "dict[str, int]", start: int, end: int) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    pool_class = MLATokenToKVPool if "kv_lora_rank" in shape else MHATokenToKVPool
    arguments = {
        "size": _POOL_TOKENS,
        "page_size": 1,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "enable_memory_saver": False,
        "layer_num": end - start,
        "start_layer": start,
        "end_layer": end,
        **shape,
    }
    known = inspect.signature(pool_class.__init__).parameters
    return pool_class(**{name: value for name, value in arguments.items() if name in known})


def outcomes(question: "dict[str, Any]") -> "list[dict[str, Any]]":
    """Of each stage the worst that its probes meet."""
    found = []
    mla = "kv_lora_rank" in question["pool"]
    for rank, (start, end) in enumerate(question["stages"]):
        pool = make_pool(question["pool"], start, end)
        worst = {"rank": rank, "kind": "own", "place": "", "got_layer": None, "repaired": True}
        for probe in question["probes"]:
            if probe["mla"] not in (None, mla) or (probe["unless"] and hasattr(pool, probe["unless"])):
                continue
            asked = start if probe["own"] else 0
            kind, got = ask(pool, probe["getter"], asked)
            if kind == "own" or worst["kind"] == "crash":
                continue
            repaired = ask(pool, probe["getter"], asked, as_repaired=True) == ("own", start)
            worst = {"rank": rank, "kind": kind, "place": probe["place"], "got_layer": got, "repaired": repaired}
        found.append(worst)
    return found


def ask(pool: Any, getter: str, layer: int, *, as_repaired: bool = False) -> "tuple[str, int | None]":
    """``(kind, layer whose memory came back)``, plainly or as while a backend is built with the fix."""
    around: Any = nullcontext()
    if as_repaired:
        from sglang_pp_mla.probes import stage_local_probes

        around = stage_local_probes(pool)
    own = range(pool.start_layer, pool.start_layer + pool.layer_num)
    layers = {_address(getattr(pool, getter)(each)): each for each in own}
    try:
        with around:
            got = layers[_address(getattr(pool, getter)(layer))]
    except IndexError:
        return "crash", None
    if as_repaired and layer not in own:
        return ("own" if got == own[0] else "wrap"), got
    return ("own" if got == layer else "wrap"), got


def _address(buffer: Any) -> int:
    return int((buffer[0] if isinstance(buffer, tuple) else buffer).data_ptr())


def split(layers: int, pp_size: int) -> "list[int]":
    from sglang.srt.distributed.utils import get_pp_indices

    ranges = [get_pp_indices(layers, rank, pp_size) for rank in range(pp_size)]
    return [end - start for start, end in ranges]


def states() -> "dict[str, str]":
    """States of the fixes here, by the .pth or else by SGLang's plugins, as a server's processes get them."""
    if "sglang_pp_mla.wiring.arming" not in sys.modules:
        try:
            from sglang.srt.plugins import load_plugins

            load_plugins()
        except ImportError:  # to 0.5.10.post1 there are none
            pass
    arming = sys.modules.get("sglang_pp_mla.wiring.arming")
    return {} if arming is None else {each.fix.name: each.state for each in arming.decisions()}


def main() -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what SGLang prints
    question = json.load(sys.stdin)
    pretend(question["gpu"], question["gpus"])
    import sglang.srt.configs.model_config
    import sglang.srt.server_args  # noqa: F401

    fixes = states()
    refusal = in_a_fork(refusal_of, question["flags"])
    pretend(None, 0)
    pp_size = len(question["stages"])
    answer.write(
        json.dumps(
            {
                "refusal": refusal,
                "split": split(question["stages"][-1][1], pp_size),
                "probes": outcomes(question),
                "fixes": fixes,
            }
        )
        + "\n"
    )
    answer.flush()
    os._exit(0)  # nothing of SGLang's is wanted any more, its shutdown included


if __name__ == "__main__":
    sys.exit(main())
