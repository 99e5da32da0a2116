"""What Lightning calls to save and to load: the strategy's part, and the plugin for local files."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_zero import host
from lightning_zero.checkpoint import full
from lightning_zero.engine import Communicator, Engine
from lightning_zero.engine.materialize import assign_state, is_meta
from lightning_zero.precision import raw_optimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy

    _Base = DDPStrategy
else:
    _Base = object


class CheckpointMethods(_Base):
    """Whole state on rank 0 for Lightning's single files, and the way back."""

    _comm: Communicator | None
    _engine: Engine | None
    _sharded: nn.Module | None
    _fit_engine: Engine | None
    _failed: bool
    _lost: bool

    @property
    def _module(self) -> "LightningModule":
        if self.lightning_module is None:
            raise RuntimeError("No module is connected: a Trainer connects one in fit, validate, test and predict.")
        return self.lightning_module

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("The module is not set up: steps can only run inside fit, validate, test and predict.")
        return self._engine

    @property
    def _communicator(self) -> Communicator:
        if self._comm is None:
            raise RuntimeError("The process group is not set up: that happens in fit, validate, test and predict.")
        return self._comm

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on rank 0, ``{}`` on the others. Collective."""
        if self._lost:
            raise RuntimeError("The last run ended with an exception: its weights cannot be collected.")
        self._say_what_happened()
        if self._engine is None or self._comm is None:
            state = super().lightning_module_state_dict()
            return state if self.is_global_zero else {}
        return full.module_state(self._module, self._engine, self._comm.rank)

    def _say_what_happened(self) -> None:
        """A callback saves because of an exception (``save_on_exception``): should the others not, they learn why."""
        error = sys.exc_info()[1]
        if error is not None and self._comm is not None and self._module.trainer.state.status == "interrupted":
            self._comm.peers.trouble = f"{type(error).__name__}: {error}"

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer, in torch's format, on rank 0; ``{}`` on the others. Collective."""
        optimizer = raw_optimizer(optimizer)
        if self._failed:
            raise RuntimeError("The last run ended with an exception: its optimizer state cannot be collected.")
        if is_stand_in(optimizer) or self._fit_engine is None:
            return super().optimizer_state(optimizer) if self.is_global_zero else {}
        return self._fit_engine.optimizer_state(optimizer, dst=0) or {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state; every rank passes the whole of it.

        Raises:
            RuntimeError: names or shapes do not fit, in torch's words.
        """
        if self._engine is not None and self._sharded is self.model:
            full.load_module_state(self._module, self._engine, checkpoint["state_dict"], strict)
        elif is_meta(self._module):
            assign_state(self._module, checkpoint["state_dict"], strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states in torch's format; every rank passes the whole of them and keeps its part.

        Raises:
            ValueError: the checkpoint has another number of optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint holds the states of {len(states)} optimizer(s), but configure_optimizers() returned"
                f" {len(self.optimizers)}."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if not is_stand_in(optimizer):
                self._running.load_optimizer_state(raw_optimizer(optimizer), state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write rank 0's checkpoint through the CheckpointIO plugin. Collective: an error is raised on all ranks."""
        filepath = self.broadcast(filepath)
        with host.together(self._comm):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint on every rank, from rank 0's path. Collective; an error is raised on all ranks."""
        checkpoint_path = self.broadcast(checkpoint_path)
        with host.together(self._comm):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return checkpoint


def is_stand_in(optimizer: Optimizer) -> bool:
    """Whether this is what Lightning puts where ``configure_optimizers`` returned None."""
    return not optimizer.param_groups


class LocalCheckpointIO(TorchCheckpointIO):
    """Lightning's plain files, written and read without a second copy in memory where they are local.

    Lightning serialises into memory first, which doubles what rank 0 holds, and reads a whole file on every rank.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``; an old file stays until the new one is complete."""
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            full.write(checkpoint, local)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``path``; tensors of a local file stay on disk until they are used."""
        local = _local(path)
        if local is None or not local.is_file():
            return super().load_checkpoint(path, map_location or _stay, weights_only)
        return full.read(local, map_location or _stay, weights_only)


def _stay(storage: Any, location: str) -> Any:
    return storage


def _local(path: Any) -> Path | None:
    text = os.fspath(path)
    return None if "://" in text or "::" in text else Path(text).expanduser()
