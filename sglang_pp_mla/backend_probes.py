"""What an attention backend of SGLang asks the KV pool while it is built, read from its source. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GETTERS = ("get_key_buffer", "get_value_buffer", "get_kv_buffer")
_REGISTRY = "srt/layers/attention/attention_registry.py"


@dataclass(frozen=True)
class Probe:
    """A question that a backend asks the KV pool while it is built.

    ``getter`` is called for the literal layer 0, or, with ``own``, for the stage's first layer; ``place`` is
    where. ``mla`` is whether that happens for MLA models only (True), for others only (False) or for all (None).
    With ``unless`` a pool that has that method is not asked.
    """

    getter: str
    own: bool
    place: str
    mla: bool | None = None
    unless: str | None = None


def backends(sglang: Path) -> dict[str, list[str]]:
    """For each backend of SGLang's registry, the modules its factory imports, as files in the ``sglang`` folder."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(_read(sglang / _REGISTRY)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        names = [name for decorator in node.decorator_list if (name := _registered(decorator))]
        modules = [each.module for each in ast.walk(node) if isinstance(each, ast.ImportFrom) and each.module]
        files = [module.partition(".")[2].replace(".", "/") + ".py" for module in modules if module[:7] == "sglang."]
        for name in names:
            found[name] = [file for file in files if (sglang / file).is_file()]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return ""


def _registered(decorator: ast.expr) -> str | None:
    if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.args:
        name = decorator.args[0]
        if decorator.func.id == "register_attention_backend" and isinstance(name, ast.Constant):
            return str(name.value)
    return None


def probes_of(sglang: Path, backend: str) -> tuple[Probe, ...]:
    """What ``backend``, a name of SGLang's registry, asks; nothing where the registry does not have it."""
    found = []
    for file in backends(sglang).get(backend, ()):
        for call, tests in _calls(ast.parse(_read(sglang / file)), ()):
            own = _asks_for(call)
            if own is None or not isinstance(call.func, ast.Attribute):
                continue
            mla: bool | None = None
            unless = None
            for test, holds in tests:
                if "use_mla" in ast.unparse(test):
                    mla = holds
                method = _has_method(test)
                if method and not holds:
                    unless = method
            found.append(Probe(call.func.attr, own, f"{file}:{call.lineno}", mla, unless))
    return tuple(found)


_Tests = tuple[tuple[ast.expr, bool], ...]


def _calls(node: ast.AST, tests: _Tests) -> Iterator[tuple[ast.Call, _Tests]]:
    """Calls below ``node``, each with the conditions it stands under, and whether they hold there."""
    if isinstance(node, ast.Call):
        yield node, tests
    if isinstance(node, ast.If):
        for each in node.body:
            yield from _calls(each, (*tests, (node.test, True)))
        for each in node.orelse:
            yield from _calls(each, (*tests, (node.test, False)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, tests)


def _asks_for(call: ast.Call) -> bool | None:
    """False for a probe of the literal layer 0, True for one of the stage's first layer, None for no probe."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _GETTERS:
        return None
    given = call.args[0] if call.args else next((each.value for each in call.keywords if each.arg == "layer_id"), None)
    if isinstance(given, ast.Constant) and given.value == 0:
        return False
    name = given.attr if isinstance(given, ast.Attribute) else given.id if isinstance(given, ast.Name) else ""
    return True if name == "start_layer" else None


def _has_method(test: ast.expr) -> str | None:
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "hasattr":
        name = test.args[1]
        return str(name.value) if isinstance(name, ast.Constant) else None
    return None
