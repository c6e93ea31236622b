"""The planner's arithmetic is the engine's: KV tokens and weights of each stage, in a rehearsal with no GPU.

On a CPU all stages share one memory, so what is free is taken from the engine itself, by a plugin of SGLang's
own kind that writes down what each rank was told and what it made of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.geometry import Model
from sglang_pp_mla.planner import Budget, token_bytes
from sglang_pp_mla.rehearsal import FORK, engine, shrink
from sglang_pp_mla.stage import parse_partition
from sglang_pp_mla.weights import Weights, weights_of

pytestmark = [pytest.mark.engine, pytest.mark.release("0.5.23")]

LAYERS = 6
SPLITS = ("2,1,3", *(pytest.param(each, marks=pytest.mark.longest) for each in ("3,3", "1,5")))
KEPT = ("w_kc", "w_vc")  # beside the parameters, for decode over the latent

_WITNESS = """
import json, os
import wrapt


def register():
    wrapt.register_post_import_hook(watch, "sglang.srt.mem_cache.kv_cache_configurator")


def watch(module):
    Configurator, seen = module.KVCacheConfigurator, {}
    profile, resolve = Configurator._profile_available_bytes, Configurator._resolve_memory_pool_config

    def seen_profile(self, pre_model_load_memory):
        seen["before"] = pre_model_load_memory
        seen["pool"] = profile(self, pre_model_load_memory)
        return seen["pool"]

    def seen_resolve(self, pre_model_load_memory):
        config = resolve(self, pre_model_load_memory)
        tensors = list(self.model.parameters())
        for layer in self.model.modules():
            tensors += [held for name in %r if (held := getattr(layer, name, None)) is not None]
        seen["weights"] = sum(held.numel() * held.element_size() for held in tensors)
        seen["tokens"] = config.max_total_num_tokens
        with open(f"{os.path.dirname(__file__)}/{self.layer_info.start_layer}.json", "w") as file:
            json.dump(seen, file)
        return config

    Configurator._profile_available_bytes, Configurator._resolve_memory_pool_config = seen_profile, seen_resolve
"""


def add_witness(folder: Path) -> dict[str, str]:
    """A plugin of SGLang's in ``folder``; returns the environment in which every process loads it."""
    (folder / "plan_witness.py").write_text(_WITNESS % (KEPT,))
    metadata = folder / "plan_witness-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plan_witness\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nplan_witness = plan_witness:register\n")
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([path] if path else [])])}


@pytest.mark.parametrize("split", SPLITS)
def test_tokens_and_weights_are_those_of_the_engine(
    split: str, kimi: dict[str, Any], tmp_path: Path, sglang_release: Version
) -> None:
    config = shrink(kimi, layers=LAYERS)
    served = tmp_path / "model"
    served.mkdir()
    (served / "config.json").write_text(json.dumps(config))
    stages = parse_partition(split, LAYERS, split.count(",") + 1)
    # What is free decides, not a limit; little of it, so that the stages' pools fit in one memory.
    arguments = {"load_format": "dummy", "max_total_tokens": None, "mem_fraction_static": 0.1}
    witness = tmp_path / "witness"
    witness.mkdir()
    with engine(
        served,
        pp_size=len(stages),
        partition=split,
        timeout_s=900,
        engine_args=arguments,
        env={**FORK, **add_witness(witness)},
    ) as session:
        assert "max_total_num_tokens" in session.log
    seen = [json.loads((witness / f"{stage.start_layer}.json").read_text()) for stage in stages]

    # Every rank was told the same memory, the least of all, to the last bit of a number that never stands still.
    assert len({rank["before"] for rank in seen}) == len({rank["pool"] for rank in seen}) == 1
    pool = seen[0]["pool"]
    model = dataclasses.replace(Model.from_config(config), dtype_bytes=4)
    cells = tuple(token_bytes(model, layer, "auto", 1, sglang_release) for layer in range(LAYERS))
    empty = Weights((0,) * LAYERS, 0, 0, 0, False)
    budget = Budget(empty, cells, (pool,) * len(stages), 0, 1, (True,) * LAYERS)
    tokens = budget.tokens([len(stage.layers) for stage in stages])
    assert {rank["tokens"] for rank in seen} == {seen[0]["tokens"]}, "all stages take the smallest"
    assert tokens == pytest.approx(seen[0]["tokens"], rel=0.01)
    assert tokens > 10_000

    weights = weights_of(model, None, pp_size=len(stages))
    for stage, rank in zip(stages, seen, strict=True):
        assert weights.stage(stage.start_layer, stage.end_layer) == pytest.approx(rank["weights"], rel=0.01), stage
