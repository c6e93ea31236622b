"""What a thread block may take on NVIDIA GPUs: data and arithmetic, no torch.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

WARP = 32
REGISTERS = 65536
"""32-bit registers of one multiprocessor, in every capability below."""
_REGISTERS_AT_ONCE = 256  # registers are given to a warp in steps of this many
_SHARED_OF_THE_SYSTEM = 1024  # bytes of shared memory that CUDA itself takes a block


@dataclass(frozen=True)
class Capability:
    """Limits of one compute capability: bytes of shared memory, warps and blocks."""

    name: str
    shared_a_block: int
    shared_a_multiprocessor: int
    warps: int
    blocks: int

    @property
    def number(self) -> int:
        return int(self.name.removeprefix("sm_"))


@dataclass(frozen=True)
class Gpu:
    """A GPU that need not be here. ``multiprocessors`` and ``memory`` (GiB) are of the largest board of the name."""

    name: str
    capability: Capability
    multiprocessors: int
    memory: int = 80


_KIB = 1024
CAPABILITIES = {
    each.name: each
    for each in (
        Capability("sm_80", 163 * _KIB, 164 * _KIB, 64, 32),
        Capability("sm_86", 99 * _KIB, 100 * _KIB, 48, 16),
        Capability("sm_89", 99 * _KIB, 100 * _KIB, 48, 24),
        Capability("sm_90", 227 * _KIB, 228 * _KIB, 64, 32),
        Capability("sm_100", 227 * _KIB, 228 * _KIB, 64, 32),
        Capability("sm_103", 227 * _KIB, 228 * _KIB, 64, 32),
        Capability("sm_120", 99 * _KIB, 100 * _KIB, 48, 24),
    )
}
# Product, capability, multiprocessors, GiB. Source: NVIDIA's data sheets.
_PRODUCTS = (
    ("A100", "sm_80", 108, 80),
    ("A800", "sm_80", 108, 80),
    ("A30", "sm_80", 56, 24),
    ("A10", "sm_86", 72, 24),
    ("A40", "sm_86", 84, 48),
    ("RTX A6000", "sm_86", 84, 48),
    ("RTX 3090", "sm_86", 82, 24),
    ("L4", "sm_89", 58, 24),
    ("L40", "sm_89", 142, 48),
    ("L40S", "sm_89", 142, 48),
    ("RTX 4090", "sm_89", 128, 24),
    ("RTX 6000 Ada", "sm_89", 142, 48),
    ("H100", "sm_90", 132, 80),
    ("H100 PCIe", "sm_90", 114, 80),
    ("H100 NVL", "sm_90", 132, 94),
    ("H200", "sm_90", 132, 141),
    ("H200 NVL", "sm_90", 132, 141),
    ("H800", "sm_90", 132, 80),
    ("H20", "sm_90", 78, 96),
    ("GH200", "sm_90", 132, 96),
    ("B200", "sm_100", 148, 180),
    ("GB200", "sm_100", 148, 186),
    ("B300", "sm_103", 148, 268),
    ("GB300", "sm_103", 148, 279),
    ("RTX PRO 6000", "sm_120", 188, 96),
    ("RTX 5090", "sm_120", 170, 32),
)
_MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 148, "sm_120": 188}


_NO_NAMES = {"nvidia", "geforce", "tesla"}


def _words(name: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _NO_NAMES)


_BY_NAME = {_words(name): Gpu(name, CAPABILITIES[capability], *sizes) for name, capability, *sizes in _PRODUCTS}
_BY_NAME |= {_words(name): Gpu(name, each, _MULTIPROCESSORS[name]) for name, each in CAPABILITIES.items()}


def gpu_named(name: str) -> Gpu:
    """The GPU of a capability (``sm_90``, ``9.0``, ``90``) or product name, as people and ``nvidia-smi`` write it.

    Words that name a form (``SXM5``) may follow, and a size (``40GB``), which is then the GPU's. Raises
    ``ValueError`` otherwise.
    """
    capability = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", name.strip().lower())
    words = ("sm", "".join(capability.groups())) if capability else _words(name)
    begins = [known for known in _BY_NAME if words[: len(known)] == known]
    if not begins:
        raise ValueError(
            f"The GPU {name!r} is not known; name one of {', '.join(known for known, *_ in _PRODUCTS)}, "
            f"or its capability: {', '.join(CAPABILITIES)}."
        )
    gpu = _BY_NAME[max(begins, key=len)]
    size = next((int(word[:-2]) for word in words if re.fullmatch(r"[1-9]\d*gb", word)), gpu.memory)
    return replace(gpu, memory=size)


def blocks_at_once(capability: Capability, *, warps: int, registers: int, shared: int) -> int:
    """Blocks of a kernel that one multiprocessor runs side by side; 0 where not even one fits."""
    if shared > capability.shared_a_block:
        return 0
    a_warp = -(-max(1, registers) * WARP // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    return min(
        capability.blocks,
        capability.warps // warps,
        REGISTERS // (a_warp * warps),
        capability.shared_a_multiprocessor // (shared + _SHARED_OF_THE_SYSTEM),
    )
