"""The module's buffers: rank 0's, as under ``ddp``."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from lightning_zero.engine.comm import Communicator


class Buffers:
    """Sends rank 0's buffers to all ranks: at the start, and before the first step after a training window in which any
    rank changed one.
    """

    def __init__(self, module: nn.Module, comm: Communicator, enabled: bool) -> None:
        self.module, self.comm = module, comm
        self.enabled = enabled
        self.changed = False
        self._broadcast()
        self._seen = self._versions()

    def changed_here(self) -> bool:
        """Whether a buffer of this rank has changed since all ranks had rank 0's."""
        return self._versions() != self._seen

    def share(self) -> None:
        """Broadcast if the last window's end has found a change (``changed``, the same on all ranks)."""
        if self.enabled and self.changed:
            self.changed = False
            self._broadcast()
            self._seen = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        if not self.enabled:
            return []
        return [(id(buffer), -1 if buffer.is_inference() else buffer._version) for buffer in self.module.buffers()]

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
