"""The strategy: Lightning's calls, in Lightning's order, each a few lines that delegate to the engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import between_steps, host
from lightning_zero.checkpoint import full
from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Communicator, Engine, check_elementwise
from lightning_zero.engine.unit import ParamState
from lightning_zero.precision import ZeroPrecision, adapt, compute_dtype, raw_optimizer

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    _Base = DDPStrategy
else:
    _Base = object


class ZeroMethods(_Base):
    """What a ZeRO strategy does differently from ``ddp``; mixed into the ``DDPStrategy`` of a Lightning namespace.

    The launcher, the environment, samplers and collectives on the default process group are inherited.
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        accelerator: "Accelerator | None" = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: "ClusterEnvironment | None" = None,
        checkpoint_io: "CheckpointIO | None" = None,
        precision_plugin: "Precision | None" = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Any,
    ) -> None:
        self.config = ZeroConfig.from_kwargs({"stage": stage, **settings})
        self._fallback_precision: ZeroPrecision | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._comm_timeout = timeout
        self._comm: Communicator | None = None
        self._engine: Engine | None = None  # while the module is sharded or hooked
        self._sharded: nn.Module | None = None  # the module of _engine
        self._fit_engine: Engine | None = None  # keeps the optimizer state of the last fit for later saves
        self._shut_out: Callable[[], None] | None = None  # takes back what lets callbacks read parameters
        self._predicting = False  # until this rank has served the others
        self._last_backward = True
        self._failed = False  # the last run ended with an exception on this rank
        self._lost = False  # and left the module sharded

    # ------------------------------------------------------------------ plugins

    @property
    def precision_plugin(self) -> "Precision":
        """Lightning's plugin for the Trainer's ``precision``, with the engine's gradient clipping."""
        if self._precision_plugin is not None:
            return self._precision_plugin
        if self._fallback_precision is None:
            self._fallback_precision = adapt(super().precision_plugin)
        return self._fallback_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: "Precision | None") -> None:
        self._precision_plugin = None if plugin is None else adapt(plugin)

    @property
    def checkpoint_io(self) -> "CheckpointIO":
        """The user's plugin, or one that writes local files without a second copy in memory."""
        if self._checkpoint_io is None:
            self._checkpoint_io = host.LocalCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: "CheckpointIO") -> None:
        self._checkpoint_io = plugin

    # ------------------------------------------------------------------ setup

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: weights are loaded into the plain module, before it is sharded."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning hands the optimizer states to :meth:`load_optimizer_state_dict`."""
        return True

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning decides when to step."""
        return False

    def setup_environment(self) -> None:
        """Join the process group.

        Raises:
            RuntimeError: the device is neither a CPU nor a CUDA GPU.
        """
        if self.root_device.type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"The ZeRO strategies run on CPU and CUDA, not on {self.root_device.type.upper()}."
                " Use Trainer(accelerator='cpu')."
            )
        host.clean_up_at_exit()
        super().setup_environment()
        self._failed = self._lost = False
        comm = host.find_communicator(self.root_device, self._comm_timeout)
        # A rank that failed in an earlier run has lost its communicator: then all make a new one.
        if not self.reduce_boolean_decision(comm is not None, all=True):
            comm = host.make_communicator(self.root_device, self._comm_timeout)
        self._comm = comm

    def setup(self, trainer: "Trainer") -> None:
        """Make optimizers on the plain module, then shard it."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        self._predicting = trainer.state.fn == "predict"
        attached = self._engine is not None and self._sharded is self.model
        if not attached:
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        if fitting:
            self._reset_optimizers_and_schedulers()
            self._fit_engine = None
            with host.together(self._comm):
                self.setup_optimizers(trainer)
        if not attached:
            self._attach(self.model)
        if fitting:
            self._fit_engine = self._engine
            self._shut_out = between_steps.let_in(trainer.callbacks, self._running, self.model)  # type: ignore[attr-defined]
        self.setup_precision_plugin()

    def _attach(self, module: nn.Module) -> None:
        assert self._comm is not None
        plugin = self.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        dtypes = compute_dtype(module, str(plugin.precision))
        self._engine = Engine(module, self.config, self._comm, compute_dtype=dtypes)
        self._sharded = module
        plugin.attach(self._engine, self.root_device)

    def setup_optimizers(self, trainer: "Trainer") -> None:
        """Call ``configure_optimizers``.

        Raises:
            ValueError: an optimizer cannot be right on shards; the message names it and says why.
        """
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_elementwise(raw_optimizer(optimizer))

    @property
    def engine(self) -> Engine | None:
        """The engine of the run in progress (memory, traffic, events); None between runs."""
        return self._engine

    # ------------------------------------------------------------------ steps

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("The module is not set up: steps can only run inside fit, validate, test and predict.")
        return self._engine

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``."""
        with self._running.forward():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``validation_step``."""
        with self._running.forward():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``test_step``."""
        with self._running.forward():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``predict_step``. Ranks may have different numbers of batches: Lightning does not fill up."""
        engine = self._running
        with engine.uneven.step(), engine.forward():
            output = super().predict_step(*args, **kwargs)
        assert self.lightning_module is not None
        if getattr(self.lightning_module.trainer.predict_loop.batch_progress, "is_last_batch", False):
            self._stay_for_others()
        return output

    def on_predict_end(self) -> None:
        """The loop is over."""
        super().on_predict_end()
        self._stay_for_others()

    def _stay_for_others(self) -> None:
        """Serve the ranks that have more batches, once, before any hook in which ranks may wait for one another."""
        if self._predicting:
            self._predicting = False
            self._running.uneven.finish()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes in the block are not the last of their accumulation window."""
        before, self._last_backward = self._last_backward, False
        try:
            yield
        finally:
            self._last_backward = before

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass; gradients are final before the ``on_after_backward`` hooks."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._running.backward(last=self._last_backward):
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (forward, backward, hooks, clipping), then step on the shards."""
        if _is_stand_in(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        module = model or self.lightning_module
        # The closure works on the whole parameters' gradients, so it runs before the shards are swapped in.
        output = self.precision_plugin._wrap_closure(module, optimizer, closure)  # type: ignore[arg-type]
        self._running.step(optimizer, **kwargs)
        return output

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on rank 0, ``{}`` on the others. Collective."""
        assert self.lightning_module is not None
        if self._lost:
            raise RuntimeError("The last run ended with an exception: its weights cannot be collected.")
        if self._engine is None or self._comm is None:
            state = super().lightning_module_state_dict()
            return state if self.is_global_zero else {}
        return full.module_state(self.lightning_module, self._engine, self._comm.rank)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer, in torch's format, on rank 0; ``{}`` on the others. Collective."""
        optimizer = raw_optimizer(optimizer)
        if self._failed:
            raise RuntimeError("The last run ended with an exception: its optimizer state cannot be collected.")
        if _is_stand_in(optimizer) or self._fit_engine is None:
            return super().optimizer_state(optimizer) if self.is_global_zero else {}
        return self._fit_engine.optimizer_state(optimizer, dst=0) or {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state; every rank passes the whole of it.

        Raises:
            RuntimeError: names or shapes do not fit, in torch's words.
        """
        assert self.lightning_module is not None
        if self._engine is not None and self._sharded is self.model:
            full.load_module_state(self.lightning_module, self._engine, checkpoint["state_dict"], strict)
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
            if not _is_stand_in(optimizer):
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

    # ------------------------------------------------------------------ the end

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks; from here on this rank takes part in no collective."""
        super().on_exception(exception)
        self._failed = True
        if self._comm is not None:
            self._comm.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Leave whole, plain parameters on every rank if the host has the memory for them."""
        if self._shut_out is not None:
            self._shut_out()
            self._shut_out = None
        whole = self._release()
        self._lost = self._failed and not whole
        if self._failed and self._comm is not None:
            host.drop_communicator(self._comm)
            self._comm = None
        # A module that is not whole can neither be moved to the CPU nor have its layers exchanged.
        module = self._lightning_module
        try:
            if not whole:
                self._lightning_module = None
            super().teardown()
        finally:
            self._lightning_module = module

    def _release(self) -> bool:
        """End the engine's hold on the module; whether the module's parameters are whole now."""
        engine = self._engine
        if engine is None:
            return True
        if not self._failed:
            self._stay_for_others()  # where the loop has skipped an empty loader
        whole = not self._failed and host.room_for_all(engine, self.num_processes)
        if not whole and not self._failed:
            return False  # stays sharded and in the engine's care, for the next run
        plugin = self.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        plugin.detach()
        engine.release(whole=whole)
        self._engine = self._sharded = None
        return whole or all(unit.state is ParamState.UNSHARDED for unit in engine.units)


def _is_stand_in(optimizer: Optimizer) -> bool:
    """Whether this is what Lightning puts where ``configure_optimizers`` returned None."""
    return not optimizer.param_groups


class ZeroStrategy(ZeroMethods, DDPStrategy):
    """Trains a LightningModule with ZeRO: optimizer state, gradients and parameters are sharded over the ranks.

    The module is not wrapped and need not know: ``strategy.model`` is the user's LightningModule.

    Args:
        stage: 0 to 3, see :class:`ZeroConfig`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for any parallel
            strategy; the Trainer fills in what is not given.
        process_group_backend: ``gloo`` or ``nccl``; None: what suits the device.
        timeout: how long a collective may take.
        start_method: how ranks are started on this machine.
        **settings: the fields of :class:`ZeroConfig`.

    Raises:
        TypeError: a setting is unknown; the message names the nearest one.
    """
