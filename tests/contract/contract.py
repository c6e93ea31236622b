"""What this package relies on in SGLang's source, checked on the text of one release without importing it.

Used by the tests for every known release and by ``tools/compatibility`` for any other. A check yields what is
missing, one sentence a thing, beginning with the file.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import wrapt

from sglang_pp_mla.fixes import BUILT_IN, Changes, Fix, Unrecognised
from sglang_pp_mla.fixes.triton_pp import FIELDS
from sglang_pp_mla.probes import GETTERS
from sglang_pp_mla.releases import ALWAYS, DRAFT_ARGUMENT, FAULTS, MODULES, PLUGINS, RELEASES
from tests.contract.skeleton import Skeleton, imported_names, source_of

RUNNER = "sglang.srt.model_executor.model_runner"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
TRITON = "sglang.srt.layers.attention.triton_backend"
ARGUMENTS = "sglang.srt.server_args"
MEMORY_POOL = "sglang.srt.mem_cache.memory_pool"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@lru_cache(maxsize=64)  # as many files as judging a release reads, so that one like it is judged faster
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Missing(Exception):
    """Something without which the rest of a check makes no sense."""


@dataclass(eq=False)
class Wheel:
    """The source of one release: ``root`` is the folder of its ``sglang`` package."""

    root: Path
    release: str

    def __post_init__(self) -> None:
        # Bound here, so that they end with the wheel: parsing takes most of the time, and the trees the memory.
        self.parse = cache(self.parse)  # type: ignore[method-assign]
        self.names = cache(self.names)  # type: ignore[method-assign]
        self.class_ = cache(self.class_)  # type: ignore[method-assign]
        self._places: dict[str, list[str]] = {}
        self._skeleton = Skeleton(self.root, self.parse)

    @property
    def is_known(self) -> bool:
        return self.release in RELEASES

    def places(self, fix: Fix) -> list[str]:
        """Where the fix finds its fault."""
        if fix.name not in self._places:
            self._places[fix.name] = fix.evidence(self.root)
        return self._places[fix.name]

    def path(self, module: str) -> str:
        """Where a module is, or would be, for people."""
        found = source_of(self.root, module)
        return found.relative_to(self.root).as_posix() if found else "/".join(module.split(".")[1:]) + ".py"

    def has(self, module: str) -> bool:
        return source_of(self.root, module) is not None

    def parse(self, module: str) -> ast.Module | None:
        found = source_of(self.root, module)
        return parsed(found.resolve()) if found else None

    def tree(self, module: str) -> ast.Module:
        tree = self.parse(module)
        if tree is None:
            raise Missing(f"{self.path(module)}: there is no such file")
        return tree

    @property
    def skeleton(self) -> Skeleton:
        """One in which nothing is changed."""
        if self._skeleton.changed():
            self._skeleton = Skeleton(self.root, self.parse)
        return self._skeleton

    def top(self, module: str, name: str, kind: Any, what: str) -> Any:
        for each in self.tree(module).body:
            if isinstance(each, kind) and each.name == name:
                return each
        raise Missing(f"{self.path(module)}: no {what} {name}")

    def class_(self, module: str, name: str) -> Class:
        return Class(self, module, self.top(module, name, ast.ClassDef, "class"))

    def names(self, module: str) -> dict[str, tuple[str, str]]:
        return imported_names(self.tree(module).body, module)


@dataclass
class Class:
    """A class of the source, with those it inherits from as far as they are SGLang's."""

    wheel: Wheel
    module: str
    node: ast.ClassDef

    @cached_property
    def bases(self) -> list[Class]:
        found = []
        for base in self.node.bases:
            if isinstance(base, ast.Name):
                module, name = self.wheel.names(self.module).get(base.id, (self.module, base.id))
                try:
                    found.append(self.wheel.class_(module, name))
                except Missing:  # not SGLang's
                    continue
        return found

    def own_function(self, name: str) -> ast.FunctionDef | None:
        return next((each for each in self.node.body if isinstance(each, FUNCTION) and each.name == name), None)

    def function(self, name: str) -> tuple[Class, ast.FunctionDef] | None:
        own = self.own_function(name)
        if own is not None:
            return self, own
        return next((found for base in self.bases if (found := base.function(name))), None)

    @cached_property
    def attributes(self) -> set[str]:
        """Everything that is defined in the class or set on ``self``, its bases' too."""
        found = {each.name for each in self.node.body if isinstance(each, FUNCTION)}
        for each in self.node.body:
            targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
        found.update(set_on_self(self.node))
        return found.union(*(base.attributes for base in self.bases))

    def lacks(self, *names: str) -> Iterator[str]:
        for name in names:
            if name not in self.attributes:
                yield f"{self.wheel.path(self.module)}: {self.node.name} has no {name}"


def set_on_self(node: ast.AST) -> set[str]:
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and getattr(each.value, "id", "") == "self"
    }


def parameters(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


# The checks


def evidence(wheel: Wheel, fix: Fix) -> Iterator[str]:
    """The fix finds its fault in the files that are known to have it and in no other."""
    if fix.name not in FAULTS:
        yield f"sglang_pp_mla/releases.py: FAULTS says nothing of {fix.name}"
        return
    found = {place.split(":")[0] for place in wheel.places(fix)}
    expected = {file for file, span in FAULTS[fix.name].items() if wheel.release in span}
    if wheel.is_known:
        yield from (f"{file}: {fix.name} does not find its fault" for file in sorted(expected - found))
        yield from (f"{file}: {fix.name} finds a fault that is not known" for file in sorted(found - expected))


def changes(wheel: Wheel, fix: Fix, module: str) -> Iterator[str]:
    """Where the fix is needed, its own code recognises the module, changes it, and takes all of it back."""
    if not wheel.places(fix):
        return
    path = wheel.path(module)
    expected = wheel.release in MODULES.get(module, ALWAYS)
    if not wheel.has(module):
        if expected:
            yield f"{path}: there is no such file"
        return
    skeleton = wheel.skeleton
    try:
        with Changes() as made:
            fix.changes[module](skeleton.module(module), made)
            if bool(skeleton.changed()) != expected:
                yield f"{path}: {fix.name} changes " + ("nothing" if expected else "what was not known to be there")
    except Unrecognised as reason:
        yield f"{path}: {fix.name} does not recognise it: {reason}"
    except Exception as error:
        yield f"{path}: {fix.name} fails on it: {type(error).__name__}: {error}"
    for name in skeleton.changed():
        yield f"{path}: {fix.name} does not take back its change of {name}"


def constructor(wheel: Wheel) -> Iterator[str]:
    """``TritonAttnBackend`` takes and sets what backend.py passes and reads."""
    backend = wheel.class_(TRITON, "TritonAttnBackend")
    init = backend.own_function("__init__")
    if init is None:
        raise Missing(f"{wheel.path(TRITON)}: TritonAttnBackend has no __init__")
    if parameters(init)[:2] != ["self", "model_runner"] or "skip_prefill" not in parameters(init):
        yield f"{wheel.path(TRITON)}: TritonAttnBackend.__init__ does not take (model_runner, ..., skip_prefill)"
    for name in ("num_head", "num_kv_head", "v_head_dim", "max_kv_splits"):
        if name not in set_on_self(init):
            yield f"{wheel.path(TRITON)}: TritonAttnBackend.__init__ does not set {name}"


def factory(wheel: Wheel) -> Iterator[str]:
    """The factory registered as ``triton`` looks ``TritonAttnBackend`` up in its module each time it is called."""
    for each in wheel.tree(REGISTRY).body:
        if isinstance(each, ast.FunctionDef) and any(
            ast.unparse(decorator) == "register_attention_backend('triton')" for decorator in each.decorator_list
        ):
            break
    else:
        raise Missing(f"{wheel.path(REGISTRY)}: no function is registered as triton")
    imported = imported_names(list(ast.walk(each)), REGISTRY)  # type: ignore[arg-type]
    constructed = [
        call.func.id for call in ast.walk(each) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    ]
    if not any(imported.get(name) == (TRITON, "TritonAttnBackend") for name in constructed):
        yield f"{wheel.path(REGISTRY)}: {each.name} does not construct TritonAttnBackend as imported when called"


def runner(wheel: Wheel) -> Iterator[str]:
    """The model runner has what backend.py reads, and says which layers are its own."""
    model_runner = wheel.class_(RUNNER, "ModelRunner")
    yield from model_runner.lacks(
        "is_draft_worker", "model_config", "pp_group", "server_args", "token_to_kv_pool", "use_mla_backend"
    )
    if "layer_info" in model_runner.attributes:
        yield from layer_info(model_runner).lacks("start_layer", "end_layer")
    else:
        yield from model_runner.lacks("start_layer", "end_layer")
    config = wheel.class_("sglang.srt.configs.model_config", "ModelConfig")
    yield from config.lacks("kv_lora_rank", "qk_rope_head_dim")
    group = wheel.class_("sglang.srt.distributed.parallel_state", "GroupCoordinator")
    yield from group.lacks("rank_in_group", "world_size")


def layer_info(model_runner: Class) -> Class:
    """The class of ``ModelRunner.layer_info``, by its annotation."""
    for each in ast.walk(model_runner.node):
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "self.layer_info":
            module, name = model_runner.wheel.names(model_runner.module).get(ast.unparse(each.annotation), ("", ""))
            if module:
                return model_runner.wheel.class_(module, name)
    raise Missing(f"{model_runner.wheel.path(model_runner.module)}: ModelRunner.layer_info has no known class")


def builders(wheel: Wheel) -> Iterator[str]:
    """What the fixes put themselves around in the model runner leads to the registry of backends."""
    for fix in BUILT_IN:
        if RUNNER not in fix.changes:
            continue
        names = wrapped_builders(wheel, fix)
        if not any(_reads_registry(wheel, name) for name in names):
            yield f"{wheel.path(RUNNER)}: nothing that {fix.name} wraps leads to ATTENTION_BACKENDS"


def wrapped_builders(wheel: Wheel, fix: Fix) -> list[str]:
    """The methods of ``ModelRunner`` that the fix wraps."""
    module = wheel.skeleton.module(RUNNER)
    with Changes() as made:
        try:
            fix.changes[RUNNER](module, made)
        except (AttributeError, Unrecognised):  # `changes` reports it
            return []
        return [name for name, value in vars(module.ModelRunner).items() if isinstance(value, wrapt.FunctionWrapper)]


def _reads_registry(wheel: Wheel, builder: str) -> bool:
    """Follows calls, by name, from a method of ``ModelRunner`` to a look-up in ``ATTENTION_BACKENDS``."""
    model_runner = wheel.class_(RUNNER, "ModelRunner")
    start = model_runner.function(builder)
    waiting = [(start[0].module, start[1])] if start else []
    seen: set[int] = set()
    while waiting:
        module, function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names = {**wheel.names(module), **imported_names(list(ast.walk(function)), module)}  # type: ignore[arg-type]
        for each in ast.walk(function):
            if isinstance(each, ast.Subscript) and getattr(each.value, "id", "") == "ATTENTION_BACKENDS":
                return True
            if not isinstance(each, ast.Call):
                continue
            if isinstance(each.func, ast.Name):
                origin, name = names.get(each.func.id, (module, each.func.id))
                if not origin.startswith("sglang.srt.model_executor."):
                    continue
                try:
                    waiting.append((origin, wheel.top(origin, name, FUNCTION, "function")))
                except Missing:  # a class, or a builtin
                    continue
            elif isinstance(each.func, ast.Attribute) and getattr(each.func.value, "id", "") == "self":
                method = model_runner.function(each.func.attr)
                if method:
                    waiting.append((method[0].module, method[1]))
    return False


def arguments(wheel: Wheel) -> Iterator[str]:
    """The four arguments are where they are looked for, share one list of choices, and may be noted on the record."""
    server_args = wheel.class_(ARGUMENTS, "ServerArgs")
    path = wheel.path(ARGUMENTS)
    declared = dict(_declared(server_args.node))
    for file in sorted((wheel.root / "srt/arg_groups/fields").glob("*.py")):  # from 0.5.20 on
        for each in wheel.tree(f"sglang.srt.arg_groups.fields.{file.stem}").body:
            if isinstance(each, ast.ClassDef):
                declared.update(_declared(each))
    wanted = [name for name in FIELDS if "draft" not in name or wheel.release in DRAFT_ARGUMENT]
    yield from (f"{path}: ServerArgs has no {name}" for name in wanted if name not in declared)
    on_command_line = {name for name in declared if "ATTENTION_BACKEND_CHOICES" in declared[name]}
    on_command_line |= {
        ast.unparse(call.args[0]).strip("'-").replace("-", "_")
        for call in ast.walk(server_args.node)
        if isinstance(call, ast.Call) and call.args and "choices=ATTENTION_BACKEND_CHOICES" in ast.unparse(call)
    }
    for name in FIELDS[:3]:
        if name not in on_command_line:
            yield f"{path}: {name} is not checked against ATTENTION_BACKEND_CHOICES"
    start = "resolve_once" if "resolve_once" in server_args.attributes else "__post_init__"
    yield from server_args.lacks(start)
    if start == "resolve_once":
        before = server_args.own_function("__post_init__")
        early = {each.attr for each in ast.walk(before) if isinstance(each, ast.Attribute)} if before else set()
        yield from (f"{path}: __post_init__ reads {name} before it is resolved" for name in sorted(early & set(FIELDS)))
    guard = server_args.own_function("__setattr__")
    if guard is not None and "startswith('_')" not in ast.unparse(guard):
        yield f"{path}: ServerArgs.__setattr__ makes no exception of underscore names"


def _declared(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)


def pools(wheel: Wheel) -> Iterator[str]:
    """The KV pools number and hand out their layers as probes.py expects."""
    for name in ("MHATokenToKVPool", "MLATokenToKVPool", "HybridLinearKVPool"):
        pool = wheel.class_(MEMORY_POOL, name)
        yield from pool.lacks("start_layer", "layer_num")
        yield from _getters(pool)
    yield from wheel.class_(MEMORY_POOL, "HybridLinearKVPool").lacks("full_attention_layer_id_mapping")
    apart = "sglang.srt.mem_cache.swa_memory_pool"
    sliding = wheel.class_(apart if wheel.has(apart) else MEMORY_POOL, "SWAKVPool")
    yield from sliding.lacks("layers_mapping")
    yield from _getters(sliding)


def _getters(pool: Class) -> Iterator[str]:
    for name in GETTERS:
        found = pool.function(name)
        if found is None or parameters(found[1])[:2] != ["self", "layer_id"]:
            yield f"{pool.wheel.path(pool.module)}: {pool.node.name}.{name} does not take (layer_id)"


def draft_workers(wheel: Wheel) -> Iterator[str]:
    """Draft workers hold the runner whose pool is asked under the name that the probe fix reads."""
    drafts = "sglang.srt.speculative.draft_utils"
    if wheel.has(drafts):
        yield from wheel.class_(drafts, "DraftBackendFactory").lacks("draft_model_runner")
    frozen = "sglang.srt.speculative.frozen_kv_mtp_worker_v2"
    if wheel.has(frozen):
        for each in wheel.tree(frozen).body:
            if isinstance(each, ast.ClassDef):
                worker = Class(wheel, frozen, each)
                if worker.function("_init_draft_attn_backend"):
                    yield from worker.lacks("draft_model_runner")


def plugins(wheel: Wheel) -> Iterator[str]:
    """SGLang loads plugins by the entry point that the wheel of this package declares."""
    package = "sglang.srt.plugins"
    if wheel.has(package) != (wheel.release in PLUGINS):
        yield f"{wheel.path(package)}: " + ("plugins were not known" if wheel.has(package) else "there is no such file")
    elif wheel.has(package) and not any(
        isinstance(each, ast.Constant) and each.value == package for each in ast.walk(wheel.tree(package))
    ):
        yield f"{wheel.path(package)}: the entry-point group {package} is gone"


def checks() -> dict[str, Callable[[Wheel], Iterator[str]]]:
    """All checks by what they are about; those of the fixes follow from the list of fixes."""
    found: dict[str, Callable[[Wheel], Iterator[str]]] = {}
    for fix in BUILT_IN:
        found[f"{fix.name}: fault"] = lambda wheel, fix=fix: evidence(wheel, fix)
        for module in fix.changes:
            found[f"{fix.name}: {module.rsplit('.', 1)[1]}"] = lambda wheel, fix=fix, module=module: changes(
                wheel, fix, module
            )
    about = (constructor, factory, runner, builders, arguments, pools, draft_workers, plugins)
    return found | {check.__name__.replace("_", " "): check for check in about}


@dataclass(frozen=True)
class Report:
    """What was found of one release."""

    release: str
    missing: dict[str, list[str]]
    """Check by check; every list is empty for a release that this package serves."""
    needed: dict[str, bool]
    """Fix by fix, whether it acts there."""
    structure: dict[str, str]
    """How this release does what others do another way."""

    @property
    def is_green(self) -> bool:
        return not any(self.missing.values())


def judge(root: Path, release: str) -> Report:
    collects = gc.isenabled()
    gc.disable()  # syntax trees are many objects without cycles; looking for some takes as long as all the rest
    try:
        wheel = Wheel(root, release)
        missing = {name: list(_sentences(check, wheel)) for name, check in checks().items()}
        needed = {fix.name: bool(wheel.places(fix)) for fix in BUILT_IN}
        return Report(release, missing, needed, structure(wheel))
    finally:
        if collects:
            gc.enable()


def _sentences(check: Callable[[Wheel], Iterator[str]], wheel: Wheel) -> Iterator[str]:
    try:
        yield from check(wheel)
    except Missing as reason:
        yield str(reason)


def structure(wheel: Wheel) -> dict[str, str]:
    try:
        model_runner, server_args = wheel.class_(RUNNER, "ModelRunner"), wheel.class_(ARGUMENTS, "ServerArgs")
    except Missing:
        return {}
    wrapped = dict.fromkeys(name for fix in BUILT_IN if RUNNER in fix.changes for name in wrapped_builders(wheel, fix))
    return {
        "a runner's backends are built by": ", ".join(f"`{name}`" for name in wrapped),
        "a runner's layers": "`layer_info`" if "layer_info" in model_runner.attributes else "the runner itself",
        "arguments are resolved by": "`resolve_once`"
        if "resolve_once" in server_args.attributes
        else "`__post_init__`",
        "loads plugins": "yes" if wheel.has("sglang.srt.plugins") else "no",
    }
