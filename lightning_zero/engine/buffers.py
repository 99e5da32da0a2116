"""The module's buffers: rank 0's, as under ``ddp``."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.comm import Communicator

SUMMED = 2**16
"""Elements of the largest buffer that is looked into for changes."""


class Buffers:
    """Sends rank 0's buffers to all ranks: at the start, and before the first step after a training window in which, or
    right before which, any rank changed one.
    """

    def __init__(self, module: nn.Module, comm: Communicator, enabled: bool) -> None:
        self.module, self.comm = module, comm
        self.enabled = enabled
        self.changed = True  # by hooks that run before the first step
        self._between = False
        self._broadcast()
        self._seen = self._at_end = self._fingerprint()

    def changed_here(self) -> bool:
        """Whether a buffer of this rank has changed in this window, or between the last one and this."""
        self._at_end = self._fingerprint()
        return self._between or self._at_end != self._seen

    def share(self) -> None:
        """Broadcast if the last window's end has found a change (``changed``, the same on all ranks).

        A first change between two windows is shared one window late: of that, only its rank knows.
        """
        if not self.enabled:
            return
        self._between = self._fingerprint() != self._at_end
        if self.changed:
            self.changed = False
            self._broadcast()
            self._seen = self._fingerprint()

    @torch.no_grad()
    def _fingerprint(self) -> list[Any]:
        """What changes with a buffer.

        Writes through ``buffer.data`` raise no version. Of real buffers on the CPU, up to ``SUMMED`` elements, they are
        found by the sum; elsewhere looking would cost more than it is worth.
        """
        if not self.enabled:
            return []
        buffers = list(self.module.buffers())
        versions = [(id(buffer), -1 if buffer.is_inference() else buffer._version) for buffer in buffers]
        small = (b for b in buffers if b.is_floating_point() and b.device.type == "cpu" and b.numel() <= SUMMED)
        sums = [buffer.sum(dtype=torch.float64) for buffer in small]
        return [versions, torch.stack(sums).view(torch.int64).tolist() if sums else []]  # bits: NaN is itself

    @torch.no_grad()
    def _broadcast(self) -> None:
        """One message for each dtype and device."""
        groups: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for buffer in self.module.buffers():
            groups[buffer.dtype, buffer.device].append(buffer)
        for buffers in groups.values() if self.comm.world_size > 1 else ():
            packed = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self.comm.broadcast_(packed)
            if self.comm.rank != 0:
                for buffer, values in zip(buffers, torch.split(packed, [b.numel() for b in buffers]), strict=True):
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(values.view(buffer.shape))
