#!/usr/bin/env python3
"""MLA under pipeline parallelism: what a Triton decode keeps for KV splits does not count the heads of a stage.

    python repro.py                                   Kimi K2.6, 188 SMs, 256 slots, no GPU
    python repro.py --heads 128 --sms 132 --slots 160

From 0.5.12 `_mla_decode_kv_splits_cap` lifts --triton-attention-num-kv-splits to the GPU's multiprocessors,
rounded up to a power of two. The backend keeps fp32 (slots, heads, cap, kv_lora_rank) for its CUDA graphs.
A tensor-parallel rank has a part of the heads, a pipeline stage all of them, and each split is launched once
for every tile of 16 heads: a stage needs fewer splits to fill the GPU and keeps more for each.

The cap is what the installed SGLang's function answers for the ranks of TP8 and PP8; its file is read, not
imported, so this takes a second.

Exit status: 0 the cap is the user's or counts the heads; 1 it does not; 2 wrong input; 3 no SGLang here.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path

CLEAN, FAULT, INCONCLUSIVE = 0, 1, 3
NAME = "_mla_decode_kv_splits_cap"


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class Triton:
    cdiv = staticmethod(lambda one, other: -(-one // other))
    next_power_of_2 = staticmethod(next_power_of_2)


def cap_function(source: Path):
    """The release's function, and the constants of its file, run as they stand there; None before 0.5.12."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    kept = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == NAME)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    names = {"next_power_of_2": next_power_of_2, "triton": Triton}
    exec(compile(ast.Module(kept, []), str(source), "exec"), names)
    return names.get(NAME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64, help="attention heads of the model")
    parser.add_argument("--latent", type=int, default=512, help="kv_lora_rank")
    parser.add_argument("--sms", type=int, default=188, help="multiprocessors of the GPU")
    parser.add_argument("--slots", type=int, default=256, help="largest batch of the CUDA graphs")
    parser.add_argument("--context", type=int, default=262144, help="context length")
    asked = parser.parse_args()
    if min(vars(asked).values()) < 1 or asked.heads % 8:
        parser.error("all numbers are positive, and the heads divide by 8")
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        print("there is no SGLang here", file=sys.stderr)
        return INCONCLUSIVE
    cap = cap_function(Path(found.origin).parent / "srt/layers/attention/triton_backend.py")
    release = importlib.metadata.version("sglang")
    if cap is None:
        print(f"SGLang {release}: the splits are --triton-attention-num-kv-splits, 8 unless set")
        return CLEAN
    counts_heads = "num_head" in inspect.signature(cap).parameters
    kept = {}
    for rank, heads in (("TP8", asked.heads // 8), ("PP8", asked.heads)):
        splits = cap(8, asked.sms, asked.context, *([heads] if counts_heads else []))
        programs = splits * -(-heads // 16)
        kept[rank] = asked.slots * heads * splits * asked.latent * 4
        print(
            f"SGLang {release}, a rank of {rank}: {heads} heads, {splits} splits, {programs} programs a request "
            f"for {asked.sms} multiprocessors, {kept[rank] / 2**30:.1f} GiB for {asked.slots} slots"
        )
    return CLEAN if counts_heads else FAULT


if __name__ == "__main__":
    sys.exit(main())
