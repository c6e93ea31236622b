"""The command that the verbs end with."""

from __future__ import annotations

from pathlib import Path


def served(model: str) -> str:
    """What SGLang is given: a folder or a hub id; a configuration alone stands for the folder it came from."""
    path = Path(model)
    return (str(path.parent) if path.name == "config.json" else "MODEL") if path.is_file() else model
