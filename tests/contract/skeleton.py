"""A skeleton of an SGLang module, built from its source text without importing SGLang or what SGLang imports.

Classes, functions with their signatures, and literal values of a module's top level are those of the source. Left
out is what running the module would need: function bodies, imports, computed values, conditional definitions,
bases and decorators from outside SGLang (but for ``ray.remote``, which has a stand-in). So a change to a module can
be made, looked at and taken back as it would be in a process that serves, while nothing of SGLang runs but the
decorators with which a module fills its own registries.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def source_of(root: Path, module: str) -> Path | None:
    """The file of a module, given the folder of the ``sglang`` package; ``None`` where there is none."""
    place = root.joinpath(*module.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def imported_names(body: list[ast.stmt], module: str) -> dict[str, tuple[str, str]]:
    """What ``from sglang… import name as alias`` binds: alias to module and name."""
    found = {}
    for statement in at_import(body):
        if isinstance(statement, ast.ImportFrom):
            above = module.rsplit(".", statement.level)[0] if statement.level else ""
            origin = ".".join(part for part in (above, statement.module) if part)
            if origin.split(".")[0] == "sglang":
                found.update({alias.asname or alias.name: (origin, alias.name) for alias in statement.names})
    return found


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run whatever the machine; those under an ``if`` may not."""
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from at_import(statement.body)
        else:
            yield statement


class Remote:
    """Stands in for what ``ray.remote`` makes of a class, as far as it can be changed."""

    def __init__(self, actor: type) -> None:
        self.__ray_metadata__ = SimpleNamespace(modified_class=actor)


class Skeleton:
    """The modules of one SGLang that were asked for, and what has been changed in them since they were built.

    ``parse`` returns the tree of a module's source, which is left as it is; ``None`` where there is no such module.
    """

    def __init__(self, root: Path, parse: Callable[[str], ast.Module | None]) -> None:
        self._root, self._parse = root, parse
        self._modules: dict[str, ModuleType] = {}
        self._as_built: dict[str, Any] = {}

    def module(self, name: str) -> ModuleType:
        """The module; ``ModuleNotFoundError`` where the release has none of this name."""
        if name not in self._modules:
            tree = self._parse(name)
            if tree is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            self._build(name, tree)
            self._as_built.update(_contents(name, vars(self._modules[name])))
        return self._modules[name]

    def changed(self) -> list[str]:
        """Dotted names, of all modules, that are not what they were when built."""
        now: dict[str, Any] = {}
        for name, module in self._modules.items():
            now.update(_contents(name, vars(module)))
        return sorted(
            each
            for each in {*now, *self._as_built}
            if each not in now or each not in self._as_built or not _same(now[each], self._as_built[each])
        )

    def _build(self, name: str, tree: ast.Module) -> None:
        module = self._modules[name] = ModuleType(name)
        module.__file__ = str(source_of(self._root, name))
        imported = imported_names(tree.body, name)

        def resolve(alias: str) -> Any:
            if alias not in imported:
                raise AttributeError(f"module {name!r} has no attribute {alias!r}")
            origin, wanted = imported[alias]
            try:
                return getattr(self.module(origin), wanted)
            except (AttributeError, ModuleNotFoundError):
                pass
            try:
                return self.module(f"{origin}.{wanted}")
            except ModuleNotFoundError:
                raise AttributeError(f"{origin} has no {wanted} that is known without importing it") from None

        # Most imported names are never asked for and each costs parsing a file: they are bound when they are.
        vars(module)["__getattr__"] = resolve
        vars(module)["ray"] = SimpleNamespace(remote=Remote)
        decorators = {name for statement in tree.body for name in _decorators(statement)}
        known: set[str] = set()
        body: list[ast.stmt] = []
        for statement in at_import(tree.body):
            if isinstance(statement, ast.ClassDef):  # a base is bound at once, as in the real module
                for base in statement.bases:
                    if isinstance(base, ast.Name) and base.id not in known and isinstance(_get(resolve, base.id), type):
                        vars(module)[base.id] = resolve(base.id)
                        known.add(base.id)
            kept = _reduced(statement, known, decorators)
            if kept is not None:
                body.append(kept)
                if isinstance(kept, ast.ClassDef | ast.FunctionDef):
                    known.add(kept.name)
        annotations_stay_text = ast.parse("from __future__ import annotations").body
        code = compile(ast.Module([*annotations_stay_text, *body], []), module.__file__, "exec", dont_inherit=True)
        exec(code, vars(module))


def _get(resolve: Any, name: str) -> Any:
    try:
        return resolve(name)
    except AttributeError:
        return None


def _reduced(statement: ast.stmt, known: set[str], decorators: set[str]) -> ast.stmt | None:
    """The statement without what needs more than this file; ``None`` where nothing is left."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        if statement.name in ("__init_subclass__", "__getattr__"):  # would run
            return None
        less = copy.copy(statement)
        less.decorator_list = [each for each in statement.decorator_list if _is_ours(each, known)]
        if statement.name not in decorators:  # never called, and compiling it is what would take long
            less.body = [ast.copy_location(ast.Pass(), statement.body[0])]
        less.args = copy.copy(statement.args)
        less.args.defaults = [_literal_or_none(each) for each in statement.args.defaults]
        less.args.kw_defaults = [each and _literal_or_none(each) for each in statement.args.kw_defaults]
        return less
    if isinstance(statement, ast.ClassDef):
        less = copy.copy(statement)
        less.decorator_list = [each for each in statement.decorator_list if ast.unparse(each) == "ray.remote"]
        less.bases = [each for each in statement.bases if isinstance(each, ast.Name) and each.id in known]
        less.keywords, less.body = [], []
        inner: set[str] = set()
        for each in statement.body:
            kept = _reduced(each, inner, decorators)
            if kept is not None:
                less.body.append(kept)
                inner.add(getattr(kept, "name", ""))
        less.body = less.body or [ast.copy_location(ast.Pass(), statement)]
        return less
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        plain = all(isinstance(each, ast.Name) and each.id != "__slots__" for each in targets)
        return statement if plain and (statement.value is None or _is_literal(statement.value)) else None
    return None


def _decorators(statement: ast.stmt) -> Iterator[str]:
    for each in getattr(statement, "decorator_list", []):
        yield ast.unparse(each.func if isinstance(each, ast.Call) else each)


def _is_ours(decorator: ast.expr, known: set[str]) -> bool:
    """Whether a decorator can run: a builtin's, a property's other half, or one that this file defines."""
    if isinstance(decorator, ast.Call):
        given = [*decorator.args, *(keyword.value for keyword in decorator.keywords)]
        return isinstance(decorator.func, ast.Name) and decorator.func.id in known and all(map(_is_literal, given))
    if isinstance(decorator, ast.Attribute):
        return decorator.attr in ("setter", "deleter") and getattr(decorator.value, "id", "") in known
    return isinstance(decorator, ast.Name) and decorator.id in {"property", "classmethod", "staticmethod", *known}


def _is_literal(expression: ast.expr) -> bool:
    try:
        ast.literal_eval(expression)
    except (ValueError, TypeError):
        return False
    return True


def _literal_or_none(expression: ast.expr) -> ast.expr:
    return expression if _is_literal(expression) else ast.copy_location(ast.Constant(None), expression)


def _contents(name: str, space: Any) -> dict[str, Any]:
    """Every name in a namespace and in the classes that it defines, with its value; a container with its items."""
    found: dict[str, Any] = {}
    for key, value in dict(space).items():
        if key == "__builtins__":
            continue
        place = f"{name}.{key}"
        if isinstance(value, Remote):
            value = value.__ray_metadata__.modified_class
        if isinstance(value, type) and f"{value.__module__}.{value.__qualname__}" == place:
            found[place] = (value,)
            found.update(_contents(place, vars(value)))
        elif isinstance(value, dict):
            found[place] = (value, *value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            found[place] = (value, *value)
        else:
            found[place] = (value,)
    return found


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
