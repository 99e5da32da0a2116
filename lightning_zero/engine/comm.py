"""All communication of the engine: the only file that calls a collective.

Gathers, reductions and control messages have process groups of their own ("lanes"), so that one kind never waits behind
another. Two transports: point-to-point messages (gloo: its own collectives are several times slower, and tags keep
messages of ranks that have parted from being taken for one another) and NCCL's collectives.

A reduction is *exact*: an all-to-all in the wire dtype, then a local sum in fp32, in rank order. It loses no precision
and gives the same bits for every way of sharding.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_zero.engine.connections import Connections
from lightning_zero.engine.lanes import Handle, Lane, Round, Start
from lightning_zero.engine.outside import Outside, failed_in
from lightning_zero.engine.peers import Peers
from lightning_zero.engine.tiers import Transfer

Bounds = Sequence[tuple[int, int]]
"""Start and stop of each rank's part of a flat tensor, in rank order."""


ENDING = 1.0
"""Seconds that threads get to end by themselves when a communicator is closed."""

PIECE = 64 * 1024
"""Elements of a sum that are worked on at a time on CPU."""


class Communicator:
    """The ranks that share one model. Collective: every rank of the default process group constructs it."""

    def __init__(self, device: torch.device, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.traffic = dict.fromkeys(("gather", "reduce", "control", "other"), 0)
        """Elements that this rank has sent, by the kind of operation."""
        self.sent_bytes = dict.fromkeys(self.traffic, 0)
        """The same in bytes."""
        self.nccl = self._has_nccl()
        backend = "nccl" if self.nccl else "gloo"
        self.peers = Peers(distributed_c10d._get_default_store(), self.rank, self.world_size)
        backends = {"gather": backend, "reduce": backend, "control": "gloo"}
        self._lanes = {name: self._lane(name, backends[name], timeout) for name in backends}
        watches = self.world_size > 1 and self._lanes["reduce"].blocking
        self._outside = Outside(self.peers) if watches else None
        self._timeout = timeout
        self._background: dist.ProcessGroup | None = None
        self._background_connections = Connections()
        self._closed = False

    def _has_nccl(self) -> bool:
        return self.device.type == "cuda" and "nccl" in dist.get_backend_config()

    def _lane(self, name: str, backend: str, timeout: timedelta) -> Lane:
        return Lane(name, backend, timeout, self.peers)

    def all_gather(
        self, full: Tensor, bounds: Bounds, what: str, kind: str = "gather", after: Transfer | None = None
    ) -> Handle:
        """Fill ``full`` (1-D): each rank has written its own part, the others' arrive. Asynchronous.

        ``what`` names the operation in errors and keeps ranks that have parted from mixing up messages. ``after``, on
        the host only, is waited for before: it still writes this rank's part.
        """
        low, high = bounds[self.rank]
        self._count(kind, (high - low) * (self.world_size - 1), full.dtype)
        lane = self._lanes["reduce" if kind == "reduce" else "gather"]
        if self.nccl:
            if len({stop - start for start, stop in bounds}) == 1:
                gather = partial(dist.all_gather_single, group=lane.group, async_op=True)
                starts = [Start(partial(gather, full, full[low:high]))]
            else:
                parts = enumerate(bounds)
                send = partial(dist.broadcast, group=lane.group, async_op=True)
                starts = [Start(partial(send, full[a:b], rank)) for rank, (a, b) in parts]
            return lane.submit(starts, what)
        tag = lane.tag(what)
        host = full.cpu()  # gloo's messages lie in host memory; on CPU this is the tensor itself
        starts = []
        for peer in self._peers_in_turn():
            start, stop = bounds[peer]
            if stop > start:
                starts.append(lane.receive(host[start:stop], peer, tag))
            if high > low:
                starts.append(lane.send(host[low:high], peer, tag))
        first: list[Round] = [[Start(lambda: after)]] if after is not None else []
        rest: list[Round] = [starts] if starts else []
        return lane.submit_rounds(first + rest, what, None if host is full else lambda: full.copy_(host))

    def exchange(self, full: Tensor, receive: Tensor, bounds: Bounds, what: str) -> Handle:
        """The traffic of a reduction: every rank's contribution to this rank's part comes to lie in :meth:`parts`.

        Point to point it is pairwise: in each round one part is sent and one received, into ``receive`` at first, then
        into the part of ``full`` that the round before has sent. So it takes the memory of one part, however many ranks
        there are. Asynchronous.

        Args:
            full: 1-D; the other ranks' parts of it are overwritten. It and ``receive`` are in use until ``wait``
                returns, and have the parts from then on.
            receive: 1-D, of the same dtype, :attr:`received_parts` parts long.
            bounds: parts of equal length.
        """
        low, high = bounds[self.rank]
        self._count("reduce", sum(b - a for a, b in bounds) - (high - low), full.dtype)
        return self._exchange(full, receive, bounds, what)

    def _exchange(self, full: Tensor, receive: Tensor, bounds: Bounds, what: str) -> Handle:
        lane = self._lanes["reduce"]
        if self.nccl:
            parts = self.parts(full, receive, bounds)
            sends = [full[start:stop] if rank != self.rank else full[:0] for rank, (start, stop) in enumerate(bounds)]
            receives = [part if rank != self.rank else receive[:0] for rank, part in enumerate(parts)]
            exchange = partial(dist.all_to_all, receives, sends, group=lane.group, async_op=True)
            return lane.submit([Start(exchange)], what)
        tag = lane.tag(what)
        host, first = full.cpu(), receive.cpu()
        parts = self.parts(host, first, bounds)
        rounds: list[Round] = []
        for turn in range(1, self.world_size if full.numel() else 1):
            to, source = (self.rank + turn) % self.world_size, (self.rank - turn) % self.world_size
            start, stop = bounds[to]
            rounds.append([lane.receive(parts[source], source, tag), lane.send(host[start:stop], to, tag)])
        back = None if host is full else lambda: (full.copy_(host), receive.copy_(first))
        return lane.submit_rounds(rounds, what, back)

    @property
    def received_parts(self) -> int:
        """Parts that :meth:`exchange` needs memory for."""
        return self.world_size - 1 if self.nccl else min(1, self.world_size - 1)

    def parts(self, full: Tensor, receive: Tensor, bounds: Bounds) -> list[Tensor]:
        """Where the contributions of all ranks to this rank's part of a reduction come to lie, in rank order."""
        low, high = bounds[self.rank]
        received = list(receive.view(self.received_parts, high - low).unbind())
        if self.nccl:
            return [*received[: self.rank], full[low:high], *received[self.rank :]]
        sent = [bounds[peer] for peer in self._peers_in_turn()]  # turn by turn: the last one keeps what it has
        places = received + [full[start:stop] for start, stop in sent[: len(sent) - 1]]
        parts = {(self.rank - turn) % self.world_size: place for turn, place in enumerate(places, 1)}
        parts[self.rank] = full[low:high]
        return [parts[rank] for rank in range(self.world_size)]

    def nothing(self) -> Handle:
        """An operation that is complete."""
        return self._lanes["gather"].submit([], "nothing")

    def _peers_in_turn(self) -> list[int]:
        """The other ranks, each rank beginning with the next: no rank is everybody's first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` with rank ``src``'s, in place."""
        if self.world_size == 1 or not tensor.numel():
            return
        self._count("other", tensor.numel() if self.rank == src else 0, tensor.dtype)
        lane = self._lanes["gather"]
        tag = lane.tag("broadcast")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # bytes: not every dtype can be sent
        host = flat if self.nccl else flat.cpu()
        if self.nccl:
            starts = [Start(partial(dist.broadcast, host, src, group=lane.group, async_op=True))]
        elif self.rank == src:
            starts = [lane.send(host, peer, tag) for peer in self._peers_in_turn()]
        else:
            starts = [lane.receive(host, src, tag)]
        lane.submit(starts, "broadcast").wait()
        if host.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(host.view(tensor.dtype).view(tensor.shape))

    def all_reduce(self, tensor: Tensor, op: str, what: str) -> Handle:
        """Reduce a small 1-D CPU tensor in place, in rank order; ``op`` is ``"max"`` or ``"sum"``. Asynchronous.

        Every rank gets every row, in rounds that double what it has (Bruck et al. 1997): log2 N messages. A collective
        of gloo's would take messages of ranks that have parted for one another, and end the process without a word
        where their sizes differ.
        """
        self._count("control", tensor.numel() * (self.world_size - 1), tensor.dtype)
        lane = self._lanes["control"]
        tag = lane.tag(what)
        rows = tensor.repeat(self.world_size, 1)  # this rank's first, then of the ranks before it
        rounds: list[Round] = []
        there = 1
        while there < self.world_size and tensor.numel():
            count = min(there, self.world_size - there)
            to, source = (self.rank + there) % self.world_size, (self.rank - there) % self.world_size
            arriving, known = rows[there : there + count].view(-1), rows[:count].view(-1)
            rounds.append([lane.receive(arriving, source, tag), lane.send(known, to, tag)])
            there *= 2
        order = [(self.rank - rank) % self.world_size for rank in range(self.world_size)]
        return lane.submit_rounds(
            rounds, what, lambda: tensor.copy_(rows.amax(0) if op == "max" else rows[order].sum(0))
        )

    def any_of(self, bits: Sequence[bool], what: str) -> list[bool]:
        """Of each bit, whether any rank has it. Collective."""
        vector = torch.tensor(bits, dtype=torch.uint8, device="cpu")
        self.all_reduce(vector, "max", what).wait()
        return [bool(bit) for bit in vector.tolist()]

    def first_of(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers, of which every rank has as many. Collective."""
        shared = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.broadcast_(shared)
        return shared.tolist()

    def gather_pieces(self, own: Tensor, out: Tensor | None, bounds: Bounds, dst: int, what: str) -> None:
        """Collect every rank's piece of a tensor on rank ``dst``; ``out`` (1-D, CPU) is given there only."""
        lane = self._lanes["control"]
        tag = lane.tag(what)
        starts = []
        own = own.detach().reshape(-1).cpu()
        if self.rank != dst and own.numel():
            starts.append(lane.send(own, dst, tag))
            self._count("other", own.numel(), own.dtype)
        elif out is not None:
            for rank, (start, stop) in enumerate(bounds):
                if rank == dst:
                    out[start:stop].copy_(own)
                elif stop > start:
                    starts.append(lane.receive(out[start:stop], rank, tag))
        lane.submit(starts, what).wait()

    def agree(self, message: str | None) -> None:
        """Raise the same error on all ranks if any of them has one.

        Raises:
            RuntimeError: names the ranks and what each of them found.
        """
        found: list[str | None] = [message]
        if self.world_size > 1:
            if not self.any_of([message is not None], "agreement")[0]:
                return
            found = self._all_objects(message)
        texts = {f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None}
        if texts:
            raise RuntimeError("\n".join(sorted(texts)))

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value (small, anything that pickles), in rank order. Collective."""
        if self.world_size == 1:
            return [value]
        self.all_reduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), "max", "meeting").wait()
        return self._all_objects(value)

    def _all_objects(self, value: Any) -> list[Any]:
        # all ranks are here, so that an unwatched collective cannot hang
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._lanes["control"].group)
        return found

    @property
    def meeting(self) -> dist.ProcessGroup:
        """A group of gloo's for libraries that communicate by themselves, while all ranks wait for that: nothing else
        may go on in it. Make sure first that all of them come (:meth:`agree`).
        """
        group: dist.ProcessGroup = self._lanes["control"].group
        return group

    def background(self) -> dist.ProcessGroup:
        """Such a group for what goes on beside training. Collective when it is first used."""
        if self._background is None:
            with self._background_connections:
                self._background = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._background

    def at(self, step: int) -> None:
        """Say which step this rank is in, for errors."""
        self.peers.step = step

    def lost_outside(self, error: BaseException) -> str:
        """In words, in which collective that is not the engine's a peer was lost; empty if the error is another."""
        where = failed_in(error)
        if not where:
            return ""
        return (
            f"Rank {self.rank} lost a peer in {where} in step {self.peers.step}. A rank has died or left; look for the "
            "first error in the output of the other ranks."
        )

    def fail(self, message: str) -> None:
        """Tell the peers that this rank will not go on; no collective."""
        self.peers.fail(message)

    def close(self) -> None:
        """End the threads; no collective, may be called again. The process groups live as long as the process.

        A thread that waits for what a peer will never send is woken by cutting the connections: were it woken while the
        interpreter takes itself down, the process would abort.
        """
        if self._closed:
            return
        self._closed = True
        if self._outside is not None:
            self._outside.close()
        for lane in self._lanes.values():
            lane.close()
        if not self._ends():
            self._cut()
            self._ends()

    def abandon(self) -> None:
        """After a failure: :meth:`close`, and wake whoever waits in the background for what this rank will never do."""
        self.close()
        self._background_connections.cut()

    def leave(self) -> None:
        """After a failure, at the end of the process: wake the peers that wait for it, and let them read why."""
        self._cut()
        self.peers.linger()

    def _ends(self) -> bool:
        deadline = time.monotonic() + ENDING
        return all(lane.ends(deadline) for lane in self._lanes.values())

    def _cut(self) -> None:
        for lane in self._lanes.values():
            lane.cut()

    def waited(self) -> dict[str, float]:
        """Seconds that the main thread has waited, by lane. (On NCCL a wait only orders streams, and takes none.)"""
        return {name: lane.waited for name, lane in self._lanes.items()}

    def watch(self, told: Callable[[str, Handle], None] | None) -> None:
        """Have ``told`` called with each operation from now on: its lane (gather, reduce or control) and its handle."""
        for lane in self._lanes.values():
            lane.watch = told

    def _count(self, kind: str, elements: int, dtype: torch.dtype) -> None:
        if self.world_size > 1:
            self.traffic[kind] += elements
            self.sent_bytes[kind] += elements * dtype.itemsize


def mean_(out: Tensor, parts: Sequence[Tensor], *, add: bool) -> Tensor:
    """Write the mean of ``parts`` to ``out``, or add it; returns the sum of its elements, 0-dim.

    It is taken in fp32 at least, in the order of ``parts``, and rounded to ``out``'s dtype; on CPU a piece that stays
    in the cache at a time. The sum is finite if the mean is (and small enough).
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out.new_zeros((), dtype=wide)
    size = PIECE if out.device.type == "cpu" else max(out.numel(), 1)
    scratch = None if wide == out.dtype and not add else out.new_empty(min(size, out.numel()), dtype=wide)
    for start in range(0, out.numel(), size):
        target = out[start : start + size]
        piece = target if scratch is None else scratch[: target.numel()]
        piece.copy_(parts[0][start : start + size])
        for part in parts[1:]:
            piece.add_(part[start : start + size])
        if len(parts) > 1:
            piece.mul_(1.0 / len(parts))
        total.add_(piece.sum())
        if add:
            target.add_(piece.to(out.dtype))
        elif piece is not target:
            target.copy_(piece)
    return total
