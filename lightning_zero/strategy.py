"""The strategy: Lightning's calls, in Lightning's order, each a few lines that delegate to the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import between_steps, host, model_checkpoint
from lightning_zero.checkpoint.background import Background
from lightning_zero.config import Given, with_settings
from lightning_zero.configured import ConfiguredMethods
from lightning_zero.engine import Communicator, Engine, PeerError, check_elementwise
from lightning_zero.engine.expected import expected
from lightning_zero.engine.guard import holds_all
from lightning_zero.engine.materialize import is_meta
from lightning_zero.engine.norm import GradientNorm
from lightning_zero.plan import fit_plan
from lightning_zero.precision import ZeroPrecision, adapt, raw_optimizer
from lightning_zero.saving import CheckpointMethods, LocalCheckpointIO, is_stand_in
from lightning_zero.steps import StepMethods
from lightning_zero.training import hidden_size, settings_of

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision


class ZeroMethods(ConfiguredMethods, StepMethods, CheckpointMethods):
    """What a ZeRO strategy does differently from ``ddp``; mixed into the ``DDPStrategy`` of a Lightning namespace.

    The launcher, the environment, samplers and collectives on the default process group are inherited.
    """

    @with_settings
    def __init__(
        self,
        stage: int | None = None,
        *,
        config: Given | None = None,
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
        self._settings = settings_of({"stage": stage, **settings}, config)
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
        self._shut_out: list[Callable[[], None]] = []  # takes back what lets callbacks read parameters, and so on
        self._background = Background()  # a save that goes on while training does
        self._last_backward = True
        self._failed = False  # the last run ended with an exception on this rank
        self._lost = False  # and left the module sharded

    @property
    def _zero_precision(self) -> ZeroPrecision:
        return adapt(self.precision_plugin)

    @property
    def checkpoint_io(self) -> "CheckpointIO":
        """The user's plugin, or one that writes local files without a second copy in memory."""
        if self._checkpoint_io is None:
            self._checkpoint_io = LocalCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: "CheckpointIO") -> None:
        self._checkpoint_io = plugin

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
        self._apply_settings(self._communicator)
        with host.together(self._comm):
            model_checkpoint.refuse_what_killed_processes_left(self._module.trainer)

    def setup(self, trainer: "Trainer") -> None:
        """Make optimizers on the plain module, then shard it."""
        accelerator, model = self.accelerator, self.model
        if accelerator is None or model is None:
            raise RuntimeError("The strategy is set up by a Trainer, which connects an accelerator and a module first.")
        accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        places = self.config.offload_optimizer.device, self.config.offload_params.device
        if "cpu" in places and self.root_device.type == "cpu":
            rank_zero_info("Offload to 'cpu' changes nothing here: without a GPU everything is in host memory.")
        self._begin_steps(trainer)
        attached = self._engine is not None and self._sharded is model
        if not attached:
            if fitting and self._layer_sync:
                self.model = model = self._layer_sync.apply(model)
            attached = is_meta(model)
            if attached:  # before the optimizers are made: the whole need not fit into memory
                self._zero_precision.convert_meta_module(model, self._attach)
            else:
                self._zero_precision.convert_module(model)
                self.model_to_device()
        if fitting:
            self._reset_optimizers_and_schedulers()
            if self._engine is not None:
                self._engine.forget_optimizers()
            self._fit_engine = None
            with host.together(self._comm):
                self.setup_optimizers(trainer)
        if not attached:
            self._attach(model)
        if fitting:
            with host.together(self._comm):
                for optimizer in self.optimizers:
                    self._running.sharded(raw_optimizer(optimizer))
            self._fit_engine = self._engine
            self._shut_out.append(between_steps.let_in(trainer.callbacks, self._running, model))  # type: ignore[attr-defined]
            self._shut_out.append(model_checkpoint.let_in(trainer, self._background))
            self._shut_out.append(fit_plan.tell(self._running, map(raw_optimizer, self.optimizers), trainer))
        self.setup_precision_plugin()

    def _attach(self, module: nn.Module) -> None:
        plugin = self._zero_precision
        if self._settings.autos:
            self._settings = self._settings.with_hidden_size(hidden_size(module))
        self._engine = Engine(
            module,
            self.config,
            self._communicator,
            compute_dtype=plugin.compute_dtype(module),
            stray_forward_context=plugin.stray_forward_context,
            rounded_layers=plugin.rounded_layers(module),
        )
        self._sharded = module
        plugin.attach(self._engine, self.root_device)

    def model_to_device(self) -> None:
        """Move buffers only: parameters go to the device unit by unit, and the whole need not fit there; those that
        wait for a file's values would have to read them now.
        """
        waits = self.model is not None and any(expected(param) for param in self.model.parameters())
        if self.model is None or (self.root_device.type == "cpu" and not waits):
            super().model_to_device()
        else:
            host.move_buffers(self.model, self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where ``configure_model`` and ``Trainer.init_module`` make tensors: in host memory, and without values on
        ``meta`` where the parameters will be sharded (they are materialised unit by unit, see ``engine.materialize``).
        """
        empty = torch.device("meta") if self.config.stage == 3 else _EmptyInit()
        with empty if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

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
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        with self._running.backward(last=self._last_backward):
            self.precision_plugin.backward(closure_loss, self._module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
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
        if is_stand_in(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._background.check()
        module = model or self.lightning_module
        plugin = self._zero_precision
        schedulers = [config.scheduler for config in self.lr_scheduler_configs if config.interval == "step"]
        return plugin.run_step(optimizer, module, closure, kwargs, schedulers)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the global norm, as ``Fabric.clip_gradients(max_norm=...)``; returns the norm before. Collective."""
        return self._running.clipper.clip_norm_(raw_optimizer(optimizer), max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by value, as ``Fabric.clip_gradients(clip_val=...)``."""
        self._running.clipper.clip_value_(raw_optimizer(optimizer), clip_val)

    @property
    def gradient_norm(self) -> GradientNorm | None:
        """The norm before and after the last clipping by norm (0-dim fp32 tensors); None if there was none."""
        return None if self._fit_engine is None else self._fit_engine.clipper.norm

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks; from here on this rank takes part in no collective."""
        super().on_exception(exception)
        self._failed = True
        unsaved = self._background.outcome()
        if unsaved is not None and str(unsaved) not in str(exception):
            exception.add_note(f"And a save that was under way has failed: {unsaved}")
        if self._sigterm is not None:
            self._sigterm.explain(exception)
        if "saved tensor hooks" in str(exception):  # torch.func's words
            exception.add_note("ZeroStrategy(saved_tensors_hooks=False) does without them: see README, Limits.")
        if self._comm is not None:
            words = self._comm.peers.last_words() or self._comm.lost_outside(exception)
            if words and not isinstance(exception, PeerError):
                exception.add_note(words)
            self._comm.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Leave whole, plain parameters on every rank if the host has the memory for them."""
        while self._shut_out:
            self._shut_out.pop()()
        self._end_steps()
        self._forget_settings()
        unsaved = self._background.outcome()
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
        if unsaved is not None and not self._failed:
            raise unsaved  # when the weights are whole again: a save that failed must not cost them

    def _release(self) -> bool:
        """End the engine's hold on the module; whether the module's parameters are whole now."""
        engine = self._engine
        if engine is None:
            # an engine that failed on its way has sharded some units already
            return self._lightning_module is None or holds_all(self._lightning_module)
        if not self._failed:
            self._stay_for_others()  # where the loop has skipped an empty loader
        whole = not self._failed and host.room_for_all(engine, self.num_processes)
        if not whole and not self._failed:
            return False  # stays sharded and in the engine's care, for the next run
        plugin = self._zero_precision
        plugin.detach()
        engine.release(whole=whole)
        self._engine = self._sharded = None
        return whole or holds_all(self._module)


class ZeroStrategy(ZeroMethods, DDPStrategy):
    """Trains a LightningModule with ZeRO: optimizer state, gradients and parameters are sharded over the ranks.

    The module is not wrapped and need not know: ``strategy.model`` is the user's LightningModule.

    Args:
        stage: 0 to 3, see :class:`ZeroConfig`; None: what ``config`` says, or 3.
        config: a DeepSpeed configuration: a path to its JSON, a mapping, or base64; None: what the environment variable
            ``PL_DEEPSPEED_CONFIG_PATH`` names, if it does. What becomes of its keys is said at the start of a run.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for any parallel
            strategy; the Trainer fills in what is not given.
        process_group_backend: ``gloo`` or ``nccl``; None: what suits the device.
        timeout: how long a collective may take.
        start_method: how ranks are started on this machine.
        **settings: the fields of :class:`ZeroConfig` and :class:`TrainingConfig`.

    Raises:
        TypeError: a setting is unknown; the message names the nearest one.
        ValueError: a value is wrong, or keywords, configuration and Trainer contradict one another.
    """
