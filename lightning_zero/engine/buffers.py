"""The module's buffers: rank 0's, as under ``ddp``."""

from torch import nn

from lightning_zero.engine.comm import Communicator


class Buffers:
    """Sends rank 0's buffers to all ranks: at the start, and before a training forward after any rank changed one."""

    def __init__(self, module: nn.Module, comm: Communicator, enabled: bool) -> None:
        self.module, self.comm = module, comm
        self.enabled = enabled
        self.changed = False
        for buffer in module.buffers():
            comm.broadcast_(buffer)
        self._seen = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        if not self.enabled:
            return []
        return [(id(buffer), -1 if buffer.is_inference() else buffer._version) for buffer in self.module.buffers()]

    def changed_here(self) -> bool:
        """Whether a buffer of this rank has changed since all ranks had rank 0's."""
        return self._versions() != self._seen

    def share(self) -> None:
        """Broadcast if the last window's end has found a change (``changed``, the same on all ranks)."""
        if self.enabled and self.changed:
            self.changed = False
            for buffer in self.module.buffers():
                self.comm.broadcast_(buffer)
            self._seen = self._versions()
