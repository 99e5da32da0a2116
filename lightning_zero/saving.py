"""What Lightning calls to save and to load: the strategy's part, and the plugin for local files."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.__version__ import version
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import host
from lightning_zero.checkpoint import folder, folders, full, reader, sharded, trust
from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.boxes import is_dense
from lightning_zero.checkpoint.load import VERSION
from lightning_zero.checkpoint.named import named_state
from lightning_zero.checkpoint.safetensors_write import save_safetensors
from lightning_zero.config import Settings
from lightning_zero.engine import Communicator, Engine
from lightning_zero.engine.elsewhere import StoredTensor
from lightning_zero.engine.expected import expect
from lightning_zero.engine.materialize import assign_state, is_meta
from lightning_zero.engine.names import clean_name, names_for
from lightning_zero.precision import raw_optimizer
from lightning_zero.requeue import Requeue

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
    _settings: Settings
    _background: Background
    _requeue: Requeue | None
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

    @property
    def _saves_folders(self) -> bool:
        return self._settings.training.state_dict_type == "sharded"

    @property
    def _saves_later(self) -> bool:
        """Whether a save may go on in the background: not where nothing else goes on, or the process may be ended."""
        urgent = self._requeue is not None and self._requeue.saving
        running = self._module.trainer.state.status == "running"
        return self._settings.training.async_save and running and not urgent

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on rank 0, ``{}`` on the others; of a sharded checkpoint each rank's part, where the
        module is sharded. Collective.
        """
        if self._lost:
            raise RuntimeError("The last run ended with an exception: its weights cannot be collected.")
        self._say_what_happened()
        if self._engine is None or self._comm is None:
            # of a sharded checkpoint on all ranks, as during a run: hooks find the same names everywhere
            state = super().lightning_module_state_dict() if self.is_global_zero or self._saves_folders else {}
            if self._saves_folders:
                state = {clean_name(name): value for name, value in state.items()}
        elif self._saves_folders:
            self._comm.agree(None)  # all ranks are here, and can meet again
            state = sharded.module_state(self._module, self._engine)
        else:
            state = full.module_state(self._module, self._engine, self._comm.rank)
        if self._settings.training.exclude_frozen:
            params = self._module.named_parameters(remove_duplicate=False)
            frozen = {clean_name(name) for name, param in params if not param.requires_grad}
            state = {name: value for name, value in state.items() if clean_name(name) not in frozen}
        return state

    def _say_what_happened(self) -> None:
        """A callback saves because of an exception (``save_on_exception``): should the others not, they learn why."""
        error = sys.exc_info()[1]
        if error is not None and self._comm is not None and self._module.trainer.state.status == "interrupted":
            self._comm.peers.trouble = f"{type(error).__name__}: {error}"

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer, in torch's format, on rank 0; ``{}`` on the others. Of a sharded checkpoint
        each rank's part, by parameters' names. Collective.
        """
        optimizer = raw_optimizer(optimizer)
        if self._failed:
            raise RuntimeError("The last run ended with an exception: its optimizer state cannot be collected.")
        if is_stand_in(optimizer) or self._fit_engine is None:
            return super().optimizer_state(optimizer) if self.is_global_zero else {}
        if self._saves_folders:
            return self._fit_engine.sharded_optimizer_state(optimizer)
        return self._fit_engine.optimizer_state(optimizer, dst=0) or {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state; every rank passes the whole of it, or what stands for a folder's.

        Raises:
            RuntimeError: names or shapes do not fit, in torch's words.
        """
        state = names_for(self._module, checkpoint["state_dict"])
        if self._engine is not None and self._sharded is self.model:
            full.load_module_state(self._module, self._engine, state, strict)
        elif any(isinstance(value, StoredTensor) for value in state.values()):
            expect(self._module, state, strict)
        elif is_meta(self._module):
            assign_state(self._module, state, strict)
        else:
            super().load_model_state_dict({"state_dict": state}, strict=strict)

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
        """Write a checkpoint: a folder, every rank its part; or a file, rank 0 through the CheckpointIO plugin.
        Collective: an error is raised on all ranks.
        """
        filepath = self.broadcast(filepath)
        if self._saves_folders:
            sharded.agree_on_parts(self._communicator, checkpoint)
            place = self._communicator, self._background, checkpoint, filepath, storage_options
            add = self._add_16bit_weights if self._settings.training.save_16bit_weights else None
            folders.save(*place, later=self._saves_later, add=add)
            return
        with host.together(self._comm):
            if self.is_global_zero:
                trust.warn_of_objects(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _add_16bit_weights(self, place: Path) -> None:
        """Write the weights into a checkpoint folder, too. Collective."""
        fp16 = str(self.precision_plugin.precision).startswith("16")
        frozen = self._settings.training.exclude_frozen
        path, dtype = place / "model.safetensors", torch.float16 if fp16 else torch.bfloat16
        state = named_state(self._module)
        left_out = [
            clean_name(name)
            for name, value in state.items()
            if not isinstance(value, nn.Parameter) and not (isinstance(value, Tensor) and is_dense(value))
        ]
        if left_out:
            rank_zero_warn(f"model.safetensors is without what is no dense tensor: {', '.join(left_out)}.")
        names = dict.fromkeys(left_out)
        save_safetensors(self._module, path, dtype=dtype, exclude_frozen=frozen, names=names)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint on every rank, from rank 0's path. Collective; an error is raised on all ranks.

        Of a folder, tensors are read when they are used, and each rank reads its part.
        """
        checkpoint_path = self.broadcast(checkpoint_path)
        with host.together(self._comm):
            self._background.wait()
            found = folders.find(checkpoint_path)
            if found is None:
                return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            checkpoint = reader.checkpoint(reader.Folder(found), weights_only)
            checkpoint.setdefault(VERSION, version)
            return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once a newer one that is being written is complete."""
        if self.is_global_zero:
            folders.remove(self._background, filepath, partial(super().remove_checkpoint, filepath))


def is_stand_in(optimizer: Optimizer) -> bool:
    """Whether this is what Lightning puts where ``configure_optimizers`` returned None."""
    return not optimizer.param_groups


class LocalCheckpointIO(TorchCheckpointIO):
    """Lightning's plain files, written and read without a second copy in memory where they are local.

    Lightning serialises into memory first, which doubles what rank 0 holds, and reads a whole file on every rank.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``; an old file stays until the new one is complete."""
        local = folder.local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            full.write(checkpoint, local)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``path``; tensors of a local file stay on disk until they are used."""
        local = folder.local(path)
        if local is None or not local.is_file():
            return super().load_checkpoint(path, map_location or _stay, weights_only)
        return full.read(local, map_location or _stay, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove ``path``; a link that leads to it leads to the newest whole folder beside it from now on."""
        local = folder.local(path)
        if local is None or not local.is_file():
            super().remove_checkpoint(path)
        else:
            folder.remove(local.absolute())


def _stay(storage: Any, location: str) -> Any:
    return storage
