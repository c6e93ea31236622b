"""Import SGLang and say what the fixes made of it. Runs by path, in an interpreter that sees no GPU.

``python importer.py MODULE…`` prints one line of JSON, the last on standard output:
``{"decisions": {fix: [state, why]}, "choices": […], "registered": {backend: factory}, "failed": {module: error}}``.
"""

import importlib
import json
import os
import sys
from typing import Any


def main(modules: list[str]) -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what SGLang prints while it is imported
    failed = {}
    for name in ("sglang.srt.server_args", "sglang.srt.layers.attention.attention_registry", *modules):
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    found: dict[str, Any] = {"failed": failed, "decisions": {}}
    arming = sys.modules.get("sglang_pp_mla.wiring.arming")
    if arming is not None:
        found["decisions"] = {each.fix.name: [each.state, each.detail] for each in arming.decisions()}
    arguments = sys.modules.get("sglang.srt.server_args")
    if arguments is not None:
        found["choices"] = list(arguments.ATTENTION_BACKEND_CHOICES)
    registry = sys.modules.get("sglang.srt.layers.attention.attention_registry")
    if registry is not None:
        found["registered"] = {
            name: f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', factory)}"
            for name, factory in registry.ATTENTION_BACKENDS.items()
        }
    answer.write(json.dumps(found) + "\n")
    answer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
