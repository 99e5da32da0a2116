"""Text for ``transformers``: a tokenizer that needs no download, and samples of one length."""

from pathlib import Path

import torch
from text import language_reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One with a token for each byte of UTF-8."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def windows(tokenizer: PreTrainedTokenizerBase, path: str | None, length: int) -> list[Tensor]:
    """The tokens of a file, or of Python's language reference, cut into samples; what is left over is dropped.

    Raises:
        ValueError: the text is shorter than one sample.
    """
    text = language_reference().decode() if path is None else Path(path).read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(tokens) < length:
        raise ValueError(f"{path} has {len(tokens)} tokens, and a sample has {length}: give a smaller --block_size.")
    return list(tokens.unfold(0, length, length))
