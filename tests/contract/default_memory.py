"""Resolve SGLang's real arguments for GPUs of many sizes; run as a program: ``default_memory.py CASES RESULT``.

CASES is a JSON list of ``{"gigabytes", "model", …}``, where the rest are server arguments. RESULT gets, for each,
what SGLang chose for memory, or its refusal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run by path, for a process that imports SGLang once

from tests.contract.resolve_arguments import plain, pretend, remembered, resolve, resolved_fields


def chosen(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    memory = int(case.pop("gigabytes") * 2**30)
    torch.cuda.mem_get_info = lambda *_args, **_kwargs: (memory, memory)
    for cache in remembered():
        cache.cache_clear()
    arguments = {"model_path": case.pop("model"), "device": "cuda", "random_seed": 1, "port": 31000}
    try:
        fields = resolved_fields(resolve({**arguments, "attention_backend": "triton", **case}))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    graphs = plain(fields.get("cuda_graph_config"))
    return {
        "mem_fraction_static": fields["mem_fraction_static"],
        "chunked_prefill_size": fields["chunked_prefill_size"],
        "slots": graphs["decode"]["max_bs"] if graphs is not None else fields["cuda_graph_max_bs"],
    }


def main(cases: str, result: str) -> None:
    pretend("hopper")
    answers = [chosen(case) for case in json.loads(Path(cases).read_text())]
    Path(result).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
