"""The independent oracle: Hugging Face transformers on the same seeded float32 weights.

SGLang's own dummy weights lie within ±0.001, so small that whole layers can be left out without a token
changing. Those made here have real size, and every layer shows in the log-probabilities.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVIATION = 0.15
"""Standard deviation of the weight matrices."""


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt: token ids, and the natural log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def _model(config: dict[str, Any]) -> Any:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    known = DeepseekV3Config(**{key: value for key, value in config.items() if key != "architectures"})
    rope = getattr(known, "rope_parameters", None) or {}
    if config.get("rope_scaling") and rope.get("rope_type", rope.get("type")) != "yarn":
        raise RuntimeError(
            f"This transformers read rope_scaling as {rope!r}, not as yarn, so it is no reference; "
            "use transformers 5.6 or later."
        )
    known._attn_implementation = "eager"
    with torch.device("cpu"):
        return DeepseekV3ForCausalLM(known).to(torch.float32).eval()


def seed_weights(model: Any, seed: int = 0) -> None:
    """Give every weight of ``model`` a value that depends on its name and ``seed`` only.

    Matrices and embeddings are normal with deviation :data:`DEVIATION`, norms normal around 1 with
    deviation 0.1, the router's choice bias normal with deviation 0.1.
    """
    import torch

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            if "norm" in name:
                tensor.copy_(1.0 + 0.1 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.1 * noise)
            else:
                tensor.copy_(DEVIATION * noise)


def write_model(config: dict[str, Any], folder: Path, *, seed: int = 0, shards_of: str = "2GB") -> Any:
    """Make the model of a shrunk ``config`` with seeded weights, save it to ``folder`` and return it.

    The ``config.json`` beside the weights is ``config`` itself: transformers leaves out what it does not
    know (``moe_layer_freq``, ``topk_method``, ``scoring_func``) and SGLang reads. Raises ``ValueError``
    for anything but a ``DeepseekV3ForCausalLM``.
    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture != "DeepseekV3ForCausalLM":
        raise ValueError(
            f"There is a reference for DeepseekV3ForCausalLM only, not for {architecture}; "
            "compare such a model with itself at pipeline size 1."
        )
    from transformers.utils.logging import disable_progress_bar

    model = _model(config)
    seed_weights(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # the caller shows how far it is
    model.save_pretrained(str(folder), max_shard_size=shards_of)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return model


def greedy(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
    """Greedy tokens and log-probabilities of ``model`` for each prompt of token ids.

    Every step is a forward pass over the whole sequence, one prompt at a time: no cache, no padding and
    no batching that could hide a fault of the same kind as the one looked for.
    """
    import torch

    answers = []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            tokens: list[int] = []
            logprobs: list[float] = []
            for _ in range(max_new_tokens):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                scores = torch.log_softmax(logits.double(), dim=-1)
                token = int(scores.argmax())
                tokens.append(token)
                logprobs.append(float(scores[token]))
                ids.append(token)
            answers.append(Answer(tuple(tokens), tuple(logprobs)))
    return answers
