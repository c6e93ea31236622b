"""What SGLang's class for an architecture can do, read from its source without importing anything of it.

SGLang's registry takes the classes that the modules of ``sglang/srt/models`` name as ``EntryClass``. A runner
with pipeline stages asserts that ``pp_proxy_tensors`` is a parameter of the model's ``forward``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

FALLBACK = "TransformersForCausalLM"
"""The class that serves an architecture for which SGLang has none of its own."""
_PROXY = "pp_proxy_tensors"
_ENTRY = re.compile(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", re.M)


@dataclass(frozen=True)
class ModelClass:
    """SGLang's class ``name`` and the file that names it as an entry, relative to the ``sglang`` folder.

    ``takes_part`` is whether its ``forward`` takes hidden states from the stage before; None where that
    cannot be read, as of a class that is put together when it is imported.
    """

    name: str
    file: str
    takes_part: bool | None


def find_model_class(sglang: Path, architecture: str) -> ModelClass | None:
    """The class that SGLang in the folder ``sglang`` serves ``architecture`` with; None if it has none for it."""
    sources = _sources_of(sglang)
    for name in (architecture, FALLBACK):
        for path in sorted((sglang / "srt" / "models").glob("*.py")):
            if name in sources.entries(path):
                return ModelClass(name, path.relative_to(sglang).as_posix(), sources.takes_part(path, name))
    return None


@dataclass
class _Sources:
    """The modules of an ``sglang`` folder, each read once and parsed only if something in it is wanted."""

    sglang: Path
    _texts: dict[Path, str] = field(default_factory=dict)
    _trees: dict[Path, ast.Module] = field(default_factory=dict)

    def text(self, path: Path) -> str:
        if path not in self._texts:
            try:
                self._texts[path] = path.read_text(encoding="utf-8-sig", errors="replace")
            except OSError:
                self._texts[path] = ""
        return self._texts[path]

    def tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self.text(path))
            except SyntaxError:  # SGLang ignores a module that cannot be imported
                self._trees[path] = ast.Module([], [])
        return self._trees[path]

    def entries(self, path: Path) -> set[str]:
        """Names in the module's ``EntryClass``."""
        return {name for match in _ENTRY.finditer(self.text(path)) for name in re.findall(r"\w+", match[1])}

    def takes_part(self, path: Path, name: str, seen: tuple[tuple[Path, str], ...] = ()) -> bool | None:
        """Whether ``forward`` of the class that ``name`` stands for in a module has the parameter.

        Bases are followed in their order, through imports; None if no ``forward`` is found that way.
        """
        if (path, name) in seen:
            return None
        seen = (*seen, (path, name))
        for node in _top_level(self.tree(path)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._of_class(path, node, seen)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        module = self._module(path, node)
                        # What is not SGLang's own takes nothing that only SGLang passes.
                        return self.takes_part(module, alias.name, seen) if module else False
            if isinstance(node, ast.Assign) and name in {ast.unparse(target) for target in node.targets}:
                return self.takes_part(path, node.value.id, seen) if isinstance(node.value, ast.Name) else None
        return None

    def _of_class(self, path: Path, node: ast.ClassDef, seen: tuple[tuple[Path, str], ...]) -> bool | None:
        for each in node.body:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name == "forward":
                arguments = (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
                return _PROXY in {argument.arg for argument in arguments}
        found = [
            self.takes_part(path, base.id, seen) if isinstance(base, ast.Name) else False  # nn.Module
            for base in node.bases
        ]
        return next((each for each in found if each is not None), None)

    def _module(self, path: Path, node: ast.ImportFrom) -> Path | None:
        """The file that a ``from … import`` of a module names, if it is one of SGLang's."""
        parts = node.module.split(".") if node.module else []
        if node.level:
            folder = path.parents[node.level - 1]
        elif parts[:1] == ["sglang"]:
            folder, parts = self.sglang, parts[1:]
        else:
            return None
        place = folder.joinpath(*parts)
        return next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()), None)


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, those under a top-level ``if`` or ``try`` too."""
    waiting: list[ast.stmt] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            inner = [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                inner += [each for handler in node.handlers for each in handler.body]
            waiting.extend(reversed(inner))


@lru_cache(maxsize=1)
def _sources_of(sglang: Path) -> _Sources:
    return _Sources(sglang)
