"""A tokenizer for a shrunk model: one pronounceable word a token, so that answers can be read aloud."""

from __future__ import annotations

import itertools
from pathlib import Path

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def words(vocab_size: int) -> list[str]:
    """The word of each token id. The first three are ``<s>``, ``</s>`` and ``<unk>``."""
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, _VOWELS)]
    made = itertools.chain(syllables, ("".join(pair) for pair in itertools.product(syllables, syllables)))
    return ["<s>", "</s>", "<unk>", *itertools.islice(made, max(0, vocab_size - 3))][:vocab_size]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``; needs ``tokenizers``."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: token for token, word in enumerate(words(vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
