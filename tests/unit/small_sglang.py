"""A small package of the layout that the fixes look at, for tests of interpreter start and of wiring.

Nothing of SGLang's own code is tested with it; a variation of it stands for a fork or a later release.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

FAULTY = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/mem_cache/__init__.py": "",
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/layers/attention/__init__.py": "",
    "sglang/srt/layers/attention/triton_backend.py": """
        class TritonAttnBackend:
            def __init__(self, runner):
                self.v_head_dim = runner.token_to_kv_pool.get_value_buffer(0)
        """,
    "sglang/srt/layers/attention/attention_registry.py": """
        ATTENTION_BACKENDS = {"triton": lambda runner: "stock"}
        """,
    "sglang/srt/model_executor/__init__.py": "",
    "sglang/srt/model_executor/model_runner.py": """
        class ModelRunner:
            def init_attention_backend(self):
                return self.token_to_kv_pool.get_value_buffer(0)

            def _get_attention_backend(self):
                return self.token_to_kv_pool.get_value_buffer(0)
        """,
    "sglang/srt/server_args.py": """
        ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]

        class ServerArgs:
            def __post_init__(self):
                pass
        """,
}

POOL = """
class Pool:
    start_layer, layer_num = 4, 3

    def get_value_buffer(self, layer_id):
        return list(range(self.start_layer, self.start_layer + self.layer_num))[layer_id - self.start_layer]

class Runner:
    token_to_kv_pool = None
"""

# Of the built-in fixes only those whose SGLang modules are here.
STATES = """
from sglang_pp_mla.fixes import BUILT_IN
from sglang_pp_mla.wiring.arming import decisions
for decision in decisions():
    if decision.fix not in BUILT_IN or decision.fix.name in ("triton-pp", "buffer-probe"):
        print(decision.fix.name, decision.state)
"""
IMPORT_ALL = """
import sglang.srt.server_args, sglang.srt.layers.attention.attention_registry
import sglang.srt.model_executor.model_runner
"""


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
