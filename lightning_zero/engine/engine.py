"""The engine: one module, sharded over the ranks of a communicator."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import ZeroConfig
from lightning_zero.engine import state
from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.buffers import Buffers
from lightning_zero.engine.build import build_units
from lightning_zero.engine.clipping import Clipper
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.elementwise import check_elementwise
from lightning_zero.engine.events import Events, Listener
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.hooks import Hooks
from lightning_zero.engine.life import ParamState
from lightning_zero.engine.modes import unseen
from lightning_zero.engine.net import Net
from lightning_zero.engine.offload import Offload
from lightning_zero.engine.optim import ShardedOptimizer
from lightning_zero.engine.reducer import Reducer
from lightning_zero.engine.residency import Residency, in_backward
from lightning_zero.engine.reuse import Reuse
from lightning_zero.engine.saved import StateAccess
from lightning_zero.engine.stages import stage_row
from lightning_zero.engine.uneven import Uneven
from lightning_zero.engine.unit import Unit


class Engine(StateAccess):
    """Shards ``module`` and runs forward, backward and step on it.

    Collective: all ranks construct it with the same module; rank 0's parameters and buffers win.

    Args:
        module: any module; it is changed in place (hooks, parameters' storage) until :meth:`release`.
        config: stage, unit sizes and the rest.
        comm: the ranks.
        compute_dtype: dtype of a parameter in the forward; None: its own. Masters keep the user's dtype (fp32 for
            16-bit parameters).
        stray_forward_context: entered around a forward of the module, or of a child of it, that somebody calls outside
            a step (autocast, where ``compute_dtype`` counts on it).
        rounded_layers: layers that autocast would let round fp32 weights at every use: where they run more than once,
            the gradients of all uses are summed in fp32.

    Raises:
        ValueError: a parameter has no values or no storage yet (lazy, meta), or the configuration does not fit the
            module.
        TierError: a tier cannot be made, or has no room; later, wherever reading or writing it fails.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        comm: Communicator,
        compute_dtype: Callable[[nn.Parameter], torch.dtype] | None = None,
        stray_forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        rounded_layers: Sequence[nn.Module] = (),
    ) -> None:
        self.module, self.config, self.comm = module, config, comm
        self._stray_forward_context = stray_forward_context
        self.record = Events()
        self.steps = 0
        self.step_seconds = 0.0
        """In optimizers' steps, altogether (on CUDA: to launch them)."""
        self.released = False
        self._depth = 0
        self._optimizers: dict[int, ShardedOptimizer] = {}
        row = stage_row(config.stage, config.reduce_at)  # type: ignore[arg-type]
        self.pool = Pool(comm.device)
        self.offload = Offload(config, comm, self.pool)
        self.units = build_units(module, config, comm, self.pool, compute_dtype, self, self.offload)
        # outlives the release: the optimizer state is still asked for then
        self.homes = {id(p): (flat, i) for unit in self.units for flat in unit.flats for i, p in enumerate(flat.params)}
        self.residency = Residency(self.units, config.prefetch, not config.saved_tensors_hooks, self.record)
        self.reducer = Reducer(
            self.units, comm, self.pool, row.reduce_at == "window", config.min_unit_bytes, self.record
        )
        self.reducer.begin_own = self._begin_own_backward
        nonfinite = config.nonfinite_gradients
        self.clipper = Clipper(self.sharded, self._close_window, self.reducer.watch, comm, nonfinite)
        self.buffers = Buffers(module, comm, config.broadcast_buffers)
        self.uneven = Uneven(self.units, self.residency, comm, self.buffers.share)
        uses_net = config.saved_tensors_hooks and any(unit.sharded for unit in self.units)
        self.net = Net(self.units if uses_net else [], self.need)
        self._hooks = Hooks(self)
        self._hooks.attach(module)
        self._reuse = Reuse(rounded_layers, self.reducer.use_ready)
        self.residency.reshard_all()
        self.pool.trim()
        comm.at(0)

    @property
    def events(self) -> Listener | None:
        """Who is told what the engine does (a list, say, see ``events``); None: nobody."""
        return self.record.listener

    @events.setter
    def events(self, listener: Listener | None) -> None:
        self.record.listener = listener

    @contextmanager
    def forward(self, on_all_ranks: bool = True) -> Iterator[None]:
        """Around a forward: parameters can be read, and what autograd saves does not keep them whole. Re-entrant.

        Args:
            on_all_ranks: whether every rank is known to run it; then it begins with rank 0's buffers.
        """
        outermost = self._depth == 0
        self._depth += 1
        try:
            if outermost:
                self.record("forward", "")
                self._enter_step(on_all_ranks)
            with self.net if outermost else nullcontext():
                yield
        finally:
            self._depth -= 1
            if outermost:
                self.record("forward_done", "")
        # not after an exception: a rank that fails alone must not wait for the others
        if outermost and not torch.is_grad_enabled() and not in_backward():
            self.residency.reshard_all()

    @contextmanager
    def called_forward(self) -> Iterator[None]:
        """Around a forward that somebody calls: in a step a part of that, elsewhere a step of its own."""
        stray = self._depth == 0 and not in_backward()
        with self.forward(on_all_ranks=False), self._stray_forward_context() if stray else nullcontext():
            yield

    def _enter_step(self, on_all_ranks: bool) -> None:
        self._abort_broken_backward()
        self._reuse.reset()
        if on_all_ranks and self.residency.keeps:
            self.residency.reshard_all()
        if torch.is_grad_enabled():
            self._hooks.watch_gradients()
        if on_all_ranks:
            self.buffers.share()
        if not in_backward():
            # both: a training step may hold forwards without gradients (a teacher)
            self.residency.trace.begin("train")
            self.residency.trace.begin("eval")
        always = [unit for unit in self.units if unit.is_root or not unit.modules]
        for unit in always:
            self.residency.launch(unit)
        if on_all_ranks and not in_backward():
            self.residency.launch_first()
        for unit in always:
            self.residency.unshard(unit)

    @unseen
    def pre_forward(self, unit: Unit) -> None:
        """A module of the unit is about to run."""
        if in_backward():
            self.residency.trace.run_again(unit.index)
        self.need(unit)
        self.net.cover()
        unit.active += 1
        self.record("forward", unit.name)

    @unseen
    def post_forward(self, unit: Unit, last: bool, failed: bool) -> None:
        """A module of the unit has run (the last one of the unit or another), or ended in an exception."""
        unit.active = max(0, unit.active - 1)
        self.net.uncover()
        self.record("forward_done", unit.name)
        if last and not failed and not in_backward():  # a recompute: its backward follows at once
            self.residency.leave(unit)

    @unseen
    def need(self, unit: Unit) -> None:
        """Make a unit readable."""
        self.residency.need(unit)

    @unseen
    def read(self, unit: Unit, name: str) -> None:
        """Somebody reads a parameter that is not here.

        Raises:
            RuntimeError: outside a step a read is not known to happen on all ranks.
        """
        if self.released:
            raise RuntimeError(
                f"The values of parameter {name!r} were lost with the run that ended with an exception: build the "
                "module again and load a checkpoint."
            )
        if unit.state is ParamState.GATHERING:
            self.residency.arrive(unit)
        elif self._depth or in_backward():
            self.residency.unshard(unit)
        else:
            raise RuntimeError(
                f"Parameter {name!r} is sharded: its values are not on this rank outside a training, validation, test "
                "or predict step. Read or change it on all ranks inside `with lightning_zero.gathered(module):`."
            )

    @contextmanager
    def backward(self, last: bool = True) -> Iterator[None]:
        """Around ``loss.backward()``; afterwards gradients are final.

        Args:
            last: whether this is the accumulation window's last micro-batch (others are only summed locally where the
                stage reduces at the window's end).
        """
        self._abort_broken_backward()
        self._hooks.watch_gradients()
        self._depth += 1
        outermost = not self.reducer.active
        if outermost:
            self._begin_backward(last)
        try:
            with self.net:
                yield
        except BaseException:
            self.reducer.abort()
            raise
        finally:
            self._depth -= 1
        if outermost:
            self._end_backward()

    def _abort_broken_backward(self) -> None:
        """A backward that the user ran without the engine's context may have ended in an exception."""
        if self.reducer.active and not in_backward():
            self.reducer.abort()

    def _begin_backward(self, last: bool) -> None:
        self.record("backward", "")
        self.residency.trace.begin("backward")
        self.reducer.begin(last, self._reuse.flats() if self._reuse.watched else None)

    def _end_backward(self) -> None:
        if self.reducer.active:
            changed = self.reducer.end(self.reducer.last and self.buffers.changed_here())
            if self.reducer.last:
                # ddp's rule: once a window, before its first forward
                self.buffers.changed = changed
            self._reuse.reset()
            self.offload.writes.settle()
            self.record("backward_done", "")
            if not self.residency.keeps:
                self.residency.reshard_all()

    @unseen
    def _begin_own_backward(self) -> None:
        """The user's own ``loss.backward()`` has brought a gradient."""
        self._begin_backward(last=True)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The sharded side of a user's optimizer.

        Raises:
            ValueError: the optimizer is not element-wise.
            TierError: its state is to rest in a tier, which has no room.
        """
        if id(optimizer) not in self._optimizers:
            check_elementwise(optimizer)
            swap = self.offload.swap
            self._optimizers[id(optimizer)] = ShardedOptimizer(optimizer, self.homes, self.config.tile_size, swap)
        return self._optimizers[id(optimizer)]

    def forget_optimizers(self) -> None:
        """Let go of the state of all optimizers: others will be used."""
        for optimizer in self._optimizers.values():
            optimizer.let_go()
        self._optimizers.clear()

    def step(self, optimizer: Optimizer, **options: Any) -> None:
        """Step the optimizer once on the shards and bring whole parameters up to date.

        Args:
            options: further arguments of the user's ``optimizer.step``.

        Raises:
            RuntimeError: a gradient is not finite (``nonfinite_gradients``); a parameter was given other data's memory.
        """
        self._close_window()
        self._settle()
        self.clipper.check_finite(optimizer)
        self.record("step", "")
        begin = time.perf_counter()
        changed = self.sharded(optimizer).step(**options)
        self.step_seconds += time.perf_counter() - begin
        self.record("step_done", "")
        self.steps += 1
        self.comm.at(self.steps)
        for unit in self.units:
            flats = [flat for flat in unit.flats if id(flat) in changed]
            for flat in flats:
                # autograd must notice that a graph from before the step holds other weights
                torch.autograd.graph.increment_version([flat.params[index] for index in changed[id(flat)]])
            self.residency.refresh(unit, flats)
        self._stay_readable()
        self.pool.trim()

    def _stay_readable(self) -> None:
        """Manual optimization: the forward goes on, and may read the root's parameters."""
        if self._depth:
            for unit in self.units:
                if unit.is_root:
                    self.residency.unshard(unit)

    def _close_window(self) -> None:
        """Reduce what has been summed, if the window's last micro-batch ran no backward."""
        if self.reducer.collector.window_open and not self.reducer.active:
            with self.backward(last=True):
                pass

    def _settle(self) -> None:
        """The shards hold everything: gathers have arrived, and the user's writes are taken over."""
        for unit in self.units:
            self.residency.arrive(unit)
            if unit.state is ParamState.UNSHARDED:
                unit.keep_writes()

    def locate(self, param: nn.Parameter) -> tuple[Flat, int] | None:
        """The flat buffer and index of a parameter; None if it is not the engine's."""
        return self.homes.get(id(param))

    @contextmanager
    def gathered(self, module: nn.Module, modifier_rank: int | None = 0) -> Iterator[None]:
        """The units of ``module``'s parameters are whole inside; see :func:`gathered`. Collective."""
        chosen = {
            place.unit.index for p in module.parameters() if (place := getattr(p, "_zero_place", None)) is not None
        }
        units = [self.units[index] for index in sorted(chosen)]
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(self._held(unit))
            yield
            if modifier_rank is not None:
                for flat in (flat for unit in units for flat in unit.flats):
                    state.take_over(flat, modifier_rank)

    @contextmanager
    def _held(self, unit: Unit) -> Iterator[None]:
        """A unit is whole inside; after an exception what was written to a sharded one is not kept."""
        self.residency.unshard(unit)
        unit.active += 1
        complete = False
        try:
            yield
            complete = True
        finally:
            unit.active -= 1
            self.residency.reshard(unit, stale=not complete)

    def release(self, whole: bool) -> None:
        """Take the engine off the module.

        Args:
            whole: leave plain, whole parameters in the user's dtype on every rank (collective); otherwise, without any
                communication, what is sharded stays so, and reading it raises.
        """
        if self.released:
            return
        self.released = True
        if whole:
            self._settle()
        self._hooks.detach()
        self._reuse.detach()
        for flat in (flat for unit in self.units for flat in unit.flats):
            flat.free_gradients()
        self.pool.clear()
        for optimizer in self._optimizers.values():
            optimizer.let_go()  # first: whole parameters need the room that windows of a step take
        for unit in self.units:
            if whole:
                state.restore(unit)
            for optimizer in self._optimizers.values():
                optimizer.forget_masters(unit.flats)

    def memory(self) -> dict[str, int]:
        """Live bytes on this rank by kind; ``buffers``: free ones, kept for reuse; ``offload_...``: in tiers."""
        return {**state.memory(self.units, self._optimizers.values(), self.pool), **self.offload.nbytes()}

    def passing_memory(self) -> dict[str, int]:
        """Live bytes on this rank of what :meth:`memory` leaves out: ``reducing``: the reductions under way;
        ``windows``: what is between a tier and its use.
        """
        windows = sum(optimizer.window_bytes for optimizer in self._optimizers.values())
        return {"reducing": self.reducer.nbytes, "windows": windows + self.offload.writes.nbytes}
