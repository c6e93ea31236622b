"""Shared by all tests: real configurations, and the release of SGLang they run against."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal.shrink import kimi_k26


@pytest.fixture(scope="session")
def sglang_release() -> Version:
    """The installed SGLang. There is none to do without, so its absence is an error and not a skip."""
    return Version(importlib.metadata.version("sglang"))


@pytest.fixture(scope="session")
def kimi() -> dict[str, Any]:
    """Configuration of the Kimi K2.6 text model, 61 layers."""
    return kimi_k26()
