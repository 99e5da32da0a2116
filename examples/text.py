"""The language reference that every Python carries, as bytes to train on."""

import math
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import DataLoader


def language_reference() -> bytes:
    """All topics of ``help()``, in alphabetical order: about 465 kB of English, grammar and code."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def unigram_entropy(text: bytes) -> float:
    """Nats per byte of the best predictor that knows the frequency of each byte and nothing else."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts)


def language_reference_loaders(
    sequence_length: int = 128, micro_batch_size: int = 4, held_out: float = 0.1
) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Training and validation batches, ``(micro_batch_size, sequence_length + 1)`` of dtype uint8.

    The last ``held_out`` of the text is for validation. The last byte of a window is the first of the next.
    """
    text = torch.frombuffer(bytearray(language_reference()), dtype=torch.uint8)
    cut = int(len(text) * (1 - held_out))
    train, validation = (part.unfold(0, sequence_length + 1, sequence_length) for part in (text[:cut], text[cut:]))
    return (
        DataLoader(list(train), micro_batch_size, shuffle=True, drop_last=True),
        DataLoader(list(validation), micro_batch_size),
    )
