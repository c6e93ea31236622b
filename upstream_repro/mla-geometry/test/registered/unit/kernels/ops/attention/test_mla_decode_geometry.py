"""The grouped MLA decode kernel against attention in float64, on the CPU -- no server."""

import json
import os
import subprocess
import sys
import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

# kv_lora_rank + qk_rope_head_dim. The launcher splits the rope part off the key tile
# for 512+64 (DeepSeek, Kimi) and 256+32, and the tiles of 192+32 are equally wide by
# chance. Elsewhere, as for 256+64 (Mistral Small 4), the key tile is the wider one.
GEOMETRIES = ["512+64", "256+32", "192+32", "256+64", "128+64", "32+16"]

# In a process of its own: Triton decides at its import whether kernels are interpreted.
DECODE = """
import json, sys

import torch

from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

LENGTHS, HEADS, SPLITS, SCALE = (5, 40, 1), 2, 8, 0.2


def difference(latent, rope):
    generator = torch.Generator().manual_seed(0)
    batch, tokens = len(LENGTHS), sum(LENGTHS)
    q = torch.randn(batch, HEADS, latent + rope, generator=generator)
    kv = torch.randn(tokens, 1, latent + rope, generator=generator)
    kv_indptr = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    out = torch.zeros(batch, HEADS, latent)
    decode_attention_fwd(
        q,
        kv,
        kv[..., :latent],
        out,
        kv_indptr,
        torch.arange(tokens),
        torch.zeros(batch, HEADS, SPLITS, latent),
        torch.zeros(batch, HEADS, SPLITS),
        torch.full((batch,), 2, dtype=torch.int32),
        SPLITS,
        SCALE,
        1.0,
        1.0,
        has_mla=True,
    )
    worst = 0.0
    for i in range(batch):
        own = kv[kv_indptr[i] : kv_indptr[i + 1], 0].double()
        weights = torch.softmax(q[i].double() @ own.T * SCALE, -1)
        error = (out[i].double() - weights @ own[:, :latent]).abs().max().item()
        worst = max(worst, error)
    return worst


results = {}
for geometry in sys.argv[1:]:
    try:
        results[geometry] = difference(*map(int, geometry.split("+")))
    except Exception as error:
        results[geometry] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


class TestMlaDecodeGeometry(CustomTestCase):
    def test_every_geometry_decodes_as_attention_in_float64(self):
        completed = subprocess.run(
            [sys.executable, "-c", DECODE, *GEOMETRIES],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        results = json.loads(completed.stdout.splitlines()[-1])
        self.assertEqual(list(results), GEOMETRIES)
        for geometry, worst in results.items():
            with self.subTest(geometry):
                self.assertIsInstance(worst, float, worst)
                self.assertLess(worst, 1e-4)


if __name__ == "__main__":
    unittest.main()
