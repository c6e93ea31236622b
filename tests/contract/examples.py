"""The examples as data: what each of them starts. Reads files, runs nothing."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNIT = EXAMPLES / "systemd" / "sglang.service"
INSTALLED = "/etc/sglang/sglang.yaml"
"""Where each of them finds the file of flags."""


def flags() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "sglang.yaml").read_text())


def environment() -> dict[str, str]:
    lines = (EXAMPLES / "sglang.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def unit() -> configparser.RawConfigParser:
    """A key that stands twice in a section is refused: systemd would take both, or the last."""
    parser = configparser.RawConfigParser(strict=True, delimiters="=", comment_prefixes="#", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text())
    return parser


def compose() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "compose.yaml").read_text())


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes" / "two-nodes.yaml").read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def container() -> dict[str, Any]:
    (only,) = manifests()["StatefulSet", "sglang"]["spec"]["template"]["spec"]["containers"]
    return only


def commands() -> dict[str, list[str]]:
    """The words that start a server, by the file they are in."""
    return {
        "systemd/sglang.service": shlex.split(unit()["Service"]["ExecStart"]),
        "compose.yaml": compose()["services"]["sglang"]["command"],
        "kubernetes/two-nodes.yaml": [*container()["command"], *container()["args"]],
    }


def launches() -> dict[str, list[str]]:
    """What SGLang is given by each of them, here and now: the file of flags is this clone's, the node is the first."""
    found = {}
    for name, words in commands().items():
        given = words[words.index("sglang.launch_server") + 1 :]
        given = [str(EXAMPLES / "sglang.yaml") if word == INSTALLED else word for word in given]
        found[f"examples/{name}"] = [word.replace("$(NODE_RANK)", "0") for word in given]
    return found
