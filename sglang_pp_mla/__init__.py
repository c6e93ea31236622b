"""Serve MLA models under pipeline parallelism on SGLang's Triton attention backend.

Every Python process of the environment imports this package through its ``.pth``, so nothing is
imported here: see :mod:`sglang_pp_mla.wiring` for what happens when SGLang appears.
"""

__version__ = "0.1.0.dev0"
