"""The language reference that every Python carries, as bytes to train on."""

import math
from collections import Counter
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader


def language_reference() -> bytes:
    """All topics of ``help()``, in alphabetical order: about 465 kB of English, grammar and code."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def unigram_entropy(text: bytes) -> float:
    """Nats per byte of the best predictor that knows the frequency of each byte and nothing else."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts)


class LanguageReference(LightningDataModule):
    """Windows of ``sequence_length + 1`` bytes, dtype uint8; the last ``held_out`` of the text is for validation."""

    def __init__(self, sequence_length: int = 128, micro_batch_size: int = 8, held_out: float = 0.1) -> None:
        super().__init__()
        self.sequence_length, self.micro_batch_size = sequence_length, micro_batch_size
        text = torch.frombuffer(bytearray(language_reference()), dtype=torch.uint8)
        cut = int(len(text) * (1 - held_out))
        self.train, self.validation = self._windows(text[:cut]), self._windows(text[cut:])

    def _windows(self, text: Tensor) -> list[Tensor]:
        """Windows that share one byte with the next: the last target of one is the first input of the other."""
        return list(text.unfold(0, self.sequence_length + 1, self.sequence_length))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.micro_batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, self.micro_batch_size)
