"""Shared by all tests: real configurations, and the release of SGLang they run against."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal.shrink import kimi_k26

# Triton looks when it is first imported, which another test may do before the one that runs a kernel.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `make test` runs on one release alone is among the longest tests on any other."""
    for item in items:
        mark = item.get_closest_marker("release")
        if mark is not None and mark.args != (importlib.metadata.version("sglang"),):
            item.add_marker("longest")


@pytest.fixture(scope="session")
def sglang_release() -> Version:
    """The installed SGLang. There is none to do without, so its absence is an error and not a skip."""
    return Version(importlib.metadata.version("sglang"))


@pytest.fixture(scope="session")
def kimi() -> dict[str, Any]:
    """Configuration of the Kimi K2.6 text model, 61 layers."""
    return kimi_k26()
