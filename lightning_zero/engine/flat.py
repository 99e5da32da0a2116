"""A flat buffer: parameters that live together as views of one tensor, with their shard and gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_zero.engine.buffer import FlatBuffer, Pool
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.dtypes import Dtypes
from lightning_zero.engine.expected import collect, give_memory
from lightning_zero.engine.gradient import ShardedGrad
from lightning_zero.engine.lanes import Handle
from lightning_zero.engine.layout import Layout
from lightning_zero.engine.rested import RestedGradient, Rests, fetch_whole, put
from lightning_zero.engine.tiers import TierArray, Transfer
from lightning_zero.engine.written import Written

Param = nn.Parameter


class Flat:
    """The parameters of one unit that share dtypes and trainability, as views of one flat buffer.

    Attributes:
        dtypes: see :class:`Dtypes`.
        full: 1-D, ``layout.numel`` elements of the compute dtype; every parameter's ``data`` is a view of it, for ever.
        shard: 1-D master weights of this rank, ``high - low`` elements; a view of ``full`` where that is whole and of
            the same dtype. Where masters rest in a tier, these weights in the compute dtype.
        master: the master weights in their tier; or None.
        rest: what ``full`` is gathered from, in its tier (then ``shard`` is empty); or None: from ``shard``.
        local: this rank's gradients, like ``full``, in the wire dtype (or the sum's, while micro-batches are summed);
            or None.
        reduced: 1-D, the mean gradient of ``low:high`` in the sum's dtype; or None.
        backing: the buffer that ``reduced`` is, or is a part of.
        rested: where ``reduced`` is between two uses, if it rests in a tier; or None.
        aliases: leaves over parameters' memory that stand for further uses of them (see ``reuse``).
        in_local, contributed, in_reduced: per parameter, whether ``local`` / the reduction under way / ``reduced``
            holds a gradient.
        marks: per parameter, the stand-in for its gradient; ``noted`` are those that may hold something themselves.
    """

    def __init__(
        self,
        name: str,
        params: dict[str, Param],
        dtypes: Dtypes,
        trained: Dtypes,
        comm: Communicator,
        pool: Pool,
        whole: bool,
        owns_all: bool,
        rests: Rests,
    ) -> None:
        self.name = name
        self.names, self.params = list(params), list(params.values())
        self.dtypes, self._trained = dtypes, trained
        self.whole, self.owns_all = whole, owns_all
        places = [torch.empty_strided(p.shape, p.stride(), device="meta") for p in self.params]
        self.layout = Layout(places, comm.world_size)
        self.low, self.high = (0, self.layout.numel) if owns_all else self.layout.shard(comm.rank)
        # of each parameter: what this rank owns of it, in the shard
        self._own = [
            (min(max(slot.start, self.low), self.high) - self.low, min(max(slot.stop, self.low), self.high) - self.low)
            for slot in self.layout.slots
        ]
        stops = [0, *(stop for _, stop in self._own)]
        self._own_sizes = [size for stop, (a, b) in zip(stops, self._own, strict=False) for size in (a - stop, b - a)]
        self._own_sizes.append(self.high - self.low - stops[-1])
        self.comm, self.pool = comm, pool
        self.rests = rests
        self.rested: RestedGradient | None = None
        if rests.optimizer is not None:
            place = self.high - self.low, dtypes.sum, f"gradients of {name}"
            self.rested = RestedGradient(rests.optimizer, *place, rests.writes, pool)
        self.master: TierArray | None = None
        self.rest: TierArray | None = None
        self.buffer = FlatBuffer(self.layout.numel, dtypes.compute, pool)
        self.full = self.buffer.tensor
        self._cut()
        self.written = Written(self)
        self.local: Tensor | None = None
        self.summing = False
        self.reduced: Tensor | None = None
        self.backing: Tensor | None = None
        self.in_local = [False] * len(self.params)
        self.contributed = [False] * len(self.params)
        self.in_reduced = [False] * len(self.params)
        self.aliases: list[Param] = []
        self.marks = [ShardedGrad(p, self, i) for i, p in enumerate(self.params)]
        self.noted: set[int] = set()

    @property
    def aliased(self) -> bool:
        """Whether the shard is a part of the resting whole: no second copy."""
        return self.whole and (self.dtypes.compute == self.dtypes.master or self.master is not None)

    @property
    def exact(self) -> bool:
        """Whether whole parameters are the master weights, and not rounded."""
        return self.whole and self.dtypes.compute == self.dtypes.master

    @torch.no_grad()
    def _cut(self) -> None:
        """Move the parameters into the buffer (see :func:`collect`), and cut this rank's shard. Collective."""
        same = self.dtypes.compute == self.dtypes.master
        exact = self.full if same else self.full.new_zeros(self.layout.numel, dtype=self.dtypes.master)
        exact.zero_()
        read = collect(self.params, self.layout, exact, (self.low, self.high), self.dtypes.user, self.comm)
        if exact is not self.full:
            self.full.copy_(exact)
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            give_memory(param, slot.view(self.full[slot.start : slot.stop]))
        self.shard = self._keep_master(exact[self.low : self.high])
        if read and self.whole:
            self.gather().wait()

    def _keep_master(self, values: Tensor) -> Tensor:
        """Put master weights where they rest; returns the shard."""
        same, tiers = self.dtypes.compute == self.dtypes.master, self.rests
        if same and tiers.params is not None:
            self.master = self.rest = put(tiers.params, values, f"parameters of {self.name}")
            return values.new_empty(0)
        if same or tiers.optimizer is None:
            return values if self.aliased else values.clone()
        self.master = put(tiers.optimizer, values, f"master weights of {self.name}")
        rounded = values.to(self.dtypes.compute)
        if tiers.params is not None:
            self.rest = put(tiers.params, rounded, f"parameters of {self.name}")
            return values.new_empty(0)
        return self.full[self.low : self.high] if self.whole else rounded

    def unfreeze(self) -> None:
        """A frozen parameter is trained from now on: masters get the precision that this takes."""
        if self.dtypes != self._trained:
            values = self.read_master(0, self.high - self.low)
            self.dtypes = self._trained
            self.master = self.rest = None
            self.shard = self._keep_master(values.to(self.dtypes.master))

    @property
    def escaped(self) -> bool:
        """Whether somebody holds a view of the whole that is not a parameter."""
        return self.buffer.is_viewed(len(self.params) + len(self.aliases) + self.aliased)

    def own_part(self, index: int) -> tuple[int, int]:
        """Start and stop, in ``full``, of what this rank owns of parameter ``index`` (empty: equal)."""
        start, stop = self._own[index]
        return start + self.low, stop + self.low

    def own_range(self, index: int) -> tuple[int, int]:
        """The same, in the shard."""
        return self._own[index]

    def own(self, tensor: Tensor, index: int) -> Tensor:
        """This rank's part of parameter ``index`` in a tensor of the shard's length."""
        start, stop = self._own[index]
        return tensor[start:stop]

    def own_parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """This rank's parts of all parameters in a tensor of the shard's length."""
        return tensor.split_with_sizes(self._own_sizes)[1::2]

    def slot(self, tensor: Tensor, index: int) -> Tensor:
        """Parameter ``index`` in a tensor of the whole's length, 1-D."""
        slot = self.layout.slots[index]
        return tensor[slot.start : slot.stop]

    @torch.no_grad()
    def gather(self) -> Handle:
        """Start to fill ``full`` from the shards."""
        self.buffer.allocate()
        own, arrives = self.full[self.low : self.high], None
        if self.rest is not None:
            arrives = fetch_whole(self.rest, own)
        elif not self.aliased:
            own.copy_(self.shard)
        if self.owns_all:
            return self.comm.nothing()
        return self.comm.all_gather(self.full, self.layout.shards(), f"gather of {self.name}", after=arrives)

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Take what the user wrote into whole parameters over into the shard."""
        self.written.take_in()
        own = self.full[self.low : self.high]
        if self.dtypes.compute != self.dtypes.master:
            # masters of values that did not change keep their precision
            master = self.read_master(0, len(own))
            changed = own != master.to(self.dtypes.compute)
            if changed.any():
                self.write_master(0, torch.where(changed, own.to(self.dtypes.master), master))
        elif not self.aliased:
            self.write_master(0, own)

    def read_master(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the shard's master weights; a view of them where they are on the device."""
        if self.master is None:
            return self.shard[start:stop]
        values = torch.empty(stop - start, dtype=self.dtypes.master, device="cpu")
        self.master.fetch(start, values).wait()
        return values.to(self.full.device)

    def own_room(self, index: int, dtype: torch.dtype) -> Tensor:
        """Memory for this rank's part of parameter ``index``: the masters themselves where they can take this dtype."""
        start, stop = self._own[index]
        if self.master is None and self.rest is None and self.shard.dtype == dtype:
            return self.shard[start:stop]
        return torch.empty(stop - start, dtype=dtype, device="cpu")

    def write_master(self, start: int, values: Tensor) -> None:
        """Overwrite master weights from element ``start`` of the shard on."""
        for store in self.store_master(start, values):
            store.wait()

    def store_master(self, start: int, values: Tensor) -> list[Transfer]:
        """The same, without waiting for tiers: ``values`` must not change before the transfers are done."""
        if self.rest is None:
            own = self.shard[start : start + values.numel()]
            if own.data_ptr() != values.data_ptr():
                own.copy_(values)
        places = {id(array): array for array in (self.master, self.rest) if array is not None}.values()
        return [array.store(start, values.to("cpu", array.dtype).contiguous()) for array in places]

    def own_master(self, index: int) -> Tensor:
        """This rank's part of parameter ``index``'s master weights."""
        return self.read_master(*self._own[index])

    def forget(self) -> None:
        """Let go of all memory; the layout stays, for the optimizer state that outlives it."""
        nothing = self.full.new_empty(0)
        self.full = self.shard = nothing
        self.master = self.rest = self.rested = None
        self.buffer.discard()

    def free_gradients(self) -> None:
        """Let go of the gradients: the stand-ins, which no garbage collector sees through, and what they stand for."""
        for param, mark in zip(self.params, self.marks, strict=True):
            if param.grad is mark:
                param.grad = None
        self.local = self.reduced = self.backing = None

    def drop(self, indices: Sequence[int]) -> None:
        """Forget the gradients of some parameters, and give back buffers in which nothing is left."""
        for index in self.noted.intersection(indices):
            self.marks[index].forget()
        self.noted = {index for index in self.noted if self.marks[index].holds_something}
        stale = [index for index in indices if self.in_reduced[index]]
        for index in indices:
            self.in_local[index] = self.in_reduced[index] = False
        if stale and any(self.in_reduced):
            with self.mean_gradient(writes=True) as reduced:
                for index in stale:
                    self.own(reduced, index).zero_()
        if self.local is not None and not any(self.in_local):
            self.pool.free(self.local)
            self.local = None
        # what this backward has contributed is in the sum already, and noted there at its end
        if not any(self.in_reduced) and not any(self.contributed):
            if self.backing is not None:
                self.pool.free(self.backing)
            self.reduced = self.backing = None
            if self.rested is not None:
                self.rested.holds = False

    @property
    def is_reduced(self) -> bool:
        """Whether there is a mean gradient, here or in a tier."""
        return self.reduced is not None or (self.rested is not None and self.rested.holds)

    @contextmanager
    def mean_gradient(self, writes: bool) -> Iterator[Tensor]:
        """``reduced``, which must be there or in a tier; it is on the device inside, and what rests in a tier is there
        again afterwards: as it was, or, if somebody ``writes`` to it, as it is then.
        """
        if self.reduced is not None:
            yield self.reduced
            return
        if self.rested is None:
            raise RuntimeError(f"{self.name} has no reduced gradient.")
        self.reduced = self.backing = values = self.rested.load()
        try:
            yield values
        finally:
            self.reduced = self.backing = None
            if writes:
                self.rested.store(values, values)
            else:
                self.pool.free(values)

    def rest_gradient(self) -> None:
        """Send a gradient that has been reduced to its tier, if it has one."""
        if self.rested is not None and self.reduced is not None and self.backing is not None:
            self.rested.store(self.reduced, self.backing)
            self.reduced = self.backing = None

    @contextmanager
    def _current_gradient(self, index: int, writes: bool) -> Iterator[tuple[Tensor | None, bool]]:
        """The 1-D tensor that holds parameter ``index``'s gradient at present, and whether it is the whole of it."""
        if self.in_local[index] and self.local is not None:
            yield self.slot(self.local, index), True
        elif not self.is_reduced:
            yield None, False
        else:
            with self.mean_gradient(writes) as reduced:
                yield self.own(reduced, index), self.high - self.low == self.layout.numel

    @torch.no_grad()
    def add_local(self, index: int, grad: Tensor) -> None:
        """Add to this rank's gradient of a parameter, of which it has one."""
        if self.local is not None:
            dense = grad.to_dense() if grad.layout is not torch.strided else grad.detach()
            self.slot(self.local, index).add_(self.layout.slots[index].flatten(dense))

    @torch.no_grad()
    def whole_master(self, index: int) -> Tensor:
        """The whole master weights of parameter ``index``, 1-D in the flat buffer's order, in memory of their own.
        Collective where they are sharded.
        """
        own = self.own_master(index)
        return own.clone() if self.owns_all else self.assemble(index, own, f"master weights of {self.names[index]}")

    def assemble(self, index: int, own: Tensor, what: str) -> Tensor:
        """A whole tensor of parameter ``index``'s size from the ranks' own parts. Collective."""
        bounds = self.layout.pieces(index)
        low, high = bounds[self.comm.rank]
        out = own.new_empty(self.layout.slots[index].numel)
        out[low:high].copy_(own)
        self.comm.all_gather(out, bounds, what, kind="reduce").wait()
        return out

    @torch.no_grad()
    def whole_gradient(self, index: int) -> Tensor:
        """The whole gradient of parameter ``index``, in the shape and dtype of ``p.grad``. Collective once it is
        reduced.
        """
        slot = self.layout.slots[index]
        with self._current_gradient(index, writes=False) as (own, whole):
            if own is None:
                raise RuntimeError(f"The gradient of {self.names[index]!r} was dropped: it cannot be read any more.")
            if not whole:
                own = self.assemble(index, own, f"gradient of {self.names[index]}")
            return slot.view(own.to(self.dtypes.compute, copy=True))

    @torch.no_grad()
    def store_gradient(self, index: int, values: Tensor, before: Tensor) -> None:
        """Overwrite the gradient of parameter ``index`` where ``values`` differs from ``before``; each rank its part.

        The rest keeps its precision, which may be higher than that of ``p.grad``.
        """
        slot = self.layout.slots[index]
        with self._current_gradient(index, writes=True) as (own, whole):
            if own is not None:
                low, high = (0, slot.numel) if whole else self.layout.pieces(index)[self.comm.rank]
                new, old = slot.flatten(values)[low:high], slot.flatten(before)[low:high]
                own.copy_(torch.where(new != old, new.to(own.dtype), own))

    @torch.no_grad()
    def adopt_gradient(self, index: int) -> None:
        """Take over a tensor that the user has put in the place of ``p.grad``: this rank keeps its part of it."""
        param, slot = self.params[index], self.layout.slots[index]
        if param.grad is None:
            return
        if not self.is_reduced:
            self.reduced = self.backing = self.pool.empty(self.high - self.low, self.dtypes.sum)
            self.rest_gradient()
        start, stop = self.own_part(index)
        values = slot.flatten(param.grad.detach())
        with self.mean_gradient(writes=True) as reduced:
            self.own(reduced, index).copy_(values[start - slot.start : stop - slot.start])
        self.in_local[index], self.in_reduced[index] = False, True
        param.grad = self.marks[index]

    @torch.no_grad()
    def zero_gradient(self, index: int) -> None:
        """``zero_grad(set_to_none=False)``: the gradient stays, as zeros."""
        if self.in_local[index] and self.local is not None:
            self.slot(self.local, index).zero_()
        if self.is_reduced:
            with self.mean_gradient(writes=True) as reduced:
                self.own(reduced, index).zero_()
