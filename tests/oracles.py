"""Runs of one training: by the engine, by torch's DDP, and by a plain loop in one process that plays all ranks."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from zoo import Batch, Model

from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Communicator, Engine

Named = Iterable[tuple[str, nn.Parameter]]
MakeModel = Callable[[int], Model]  # from a seed
MakeOptimizer = Callable[[Named], Optimizer]
Follow = Callable[[Optimizer, Named], Callable[[], Any]]  # from the optimizer to what is called after each step
STEPS = 6


@contextlib.contextmanager
def communicator() -> Iterator[Communicator]:
    comm = Communicator(device=torch.device("cpu"), timeout=timedelta(minutes=2))
    try:
        yield comm
    finally:
        comm.close()


def adamw(named: Named) -> Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1)


@dataclass
class Run:
    """What a training ended with on this rank."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: Any = None


def differences(got: Run, want: Run, buffers: bool = True) -> list[str]:
    """Names of all weights, losses and buffers that are not equal to the bit."""
    found = [f"loss {got.losses} is not {want.losses}"] if got.losses != want.losses else []
    for kind in ("weights", "buffers") if buffers else ("weights",):
        mine, other = getattr(got, kind), getattr(want, kind)
        if list(mine) != list(other):
            found.append(f"{kind} {list(mine)} are not {list(other)}")
            continue
        for name, value in other.items():
            if mine[name].dtype != value.dtype or not torch.equal(mine[name], value):
                gap = (mine[name] - value).abs().max() if mine[name].shape == value.shape else mine[name].shape
                found.append(f"{kind} {name} differ by {gap}")
    return found


def assert_same(got: Run, want: Run, what: str = "", buffers: bool = True) -> None:
    found = differences(got, want, buffers)
    assert not found, f"{what}: " + "; ".join(found)


def assert_close(got: Run, want: Run, what: str, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for name, value in want.weights.items():
        torch.testing.assert_close(
            got.weights[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{what}, {n}: {m}"
        )


def assert_same_state(got: Any, want: Any, where: str = "state") -> None:
    """Compare two optimizer state dicts, to the bit and with all keys."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor) and got.dtype == want.dtype and torch.equal(got, want), (
            f"{where}: {got} is not {want}"
        )
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: {list(got)} is not {list(want)}"
        for key in want:
            assert_same_state(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{where}: {got} is not {want}"
        for index, (mine, other) in enumerate(zip(got, want, strict=True)):
            assert_same_state(mine, other, f"{where}[{index}]")
    else:
        assert got == want, f"{where}: {got} is not {want}"


def squares(gradient: Tensor) -> Tensor:
    """The sum of squares in fp64, of which a norm does not depend on how the gradient is cut."""
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).double().pow(2).sum()


def clip_by_norm(gradients: list[Tensor], max_norm: float) -> float:
    """Torch's formula with a norm from an fp64 sum of squares, rounded to fp32."""
    norm = torch.stack([squares(g) for g in gradients]).sum().sqrt().float()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm.item()


def seeded(model: Model, rank: int, step: int) -> Batch:
    """The batch of a micro-step; torch's generator starts at the same place on every path."""
    batch = model.batch(rank, step)
    torch.manual_seed(7 * step + rank)
    return batch


def linear_in_bf16(model: nn.Module) -> Callable[[nn.Parameter], torch.dtype]:
    """bf16 for what is owned by nothing but ``nn.Linear``: the weights that autocast would round at each use."""
    owners: dict[int, set[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(type(module))
    return lambda p: torch.bfloat16 if owners[id(p)] == {nn.Linear} else p.dtype


def precision(autocast: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()


def finish(model: nn.Module, losses: list[float], norms: list[float], state: Any = None) -> Run:
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(value.isfinite().all() for value in weights.values()), "the training itself has gone astray"
    return Run(weights, {name: b.detach().clone() for name, b in model.named_buffers()}, losses, norms, state)


def build_engine(model: Model, comm: Communicator, autocast: bool = False, **config: Any) -> Engine:
    """An engine that cuts the model as finely as it can be cut, unless ``config`` says otherwise."""
    settings = {"min_unit_bytes": 0, **model.config, **config}
    return Engine(model, ZeroConfig(**settings), comm, compute_dtype=linear_in_bf16(model) if autocast else None)


def engine_step(
    engine: Engine, model: Model, optimizer: Optimizer, comm: Communicator, step: int, *,
    accumulate: int = 1, clip: float | None = None, autocast: bool = False,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """One step of training; returns the losses and the norm before clipping."""
    losses, norms = [], []
    for micro in range(accumulate):
        batch = seeded(model, comm.rank, step * accumulate + micro)
        with engine.forward(), precision(autocast):
            loss = model.loss(batch)
        with engine.backward(last=micro == accumulate - 1):
            (loss / accumulate).backward()
        losses.append(loss.item())
    if clip is not None:
        norms.append(engine.clipper.clip_norm_(optimizer, clip).item())
    engine.step(optimizer)
    optimizer.zero_grad()
    model.zero_grad()  # also parameters that are in no group
    return losses, norms


def train_engine(
    make: MakeModel, comm: Communicator, *, steps: int = STEPS, accumulate: int = 1, clip: float | None = None,
    autocast: bool = False, optimizer: MakeOptimizer = adamw, follow: Follow | None = None, with_state: bool = False,
    **config: Any,
) -> Run:  # fmt: skip
    """Train on the engine. Ranks begin with different weights: rank 0's must win."""
    model = make(comm.rank)
    engine = build_engine(model, comm, autocast, **config)
    named = list(model.named_parameters())
    chosen = optimizer(named)
    after = follow(chosen, named) if follow is not None else None
    losses, norms = [], []
    for step in range(steps):
        new = engine_step(engine, model, chosen, comm, step, accumulate=accumulate, clip=clip, autocast=autocast)
        losses += new[0]
        norms += new[1]
        if after is not None:
            after()
    state = engine.optimizer_state(chosen) if with_state else None
    engine.release(whole=True)
    return finish(model, losses, norms, state)


class Step(nn.Module):
    """Makes the loss the output of a forward, for wrappers that hook into that."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.model.loss(batch)


def train_ddp(
    make: MakeModel, rank: int, *, steps: int = STEPS, accumulate: int = 1, clip: float | None = None,
    autocast: bool = False, torch_clip: bool = False, optimizer: MakeOptimizer = adamw,
) -> Run:  # fmt: skip
    """Train on torch's DDP as Lightning's ``ddp`` does."""
    model = make(rank)
    ddp = DistributedDataParallel(Step(model), gradient_as_bucket_view=True, find_unused_parameters=model.unused)
    chosen = optimizer(list(model.named_parameters()))
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulate):
            batch = seeded(model, rank, step * accumulate + micro)
            with contextlib.nullcontext() if micro == accumulate - 1 else ddp.no_sync():
                with precision(autocast):
                    loss = ddp(batch)
                (loss / accumulate).backward()
            losses.append(loss.item())
        if clip is not None and torch_clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        elif clip is not None:
            norms.append(clip_by_norm([p.grad for p in model.parameters() if p.grad is not None], clip))
        chosen.step()
        chosen.zero_grad()
    return finish(model, losses, norms)


def plain(make: MakeModel, **options: Any) -> Run:
    """What this rank should see: :func:`play_all_ranks`, run on rank 0 and sent to all."""
    rank = dist.get_rank()
    box = [play_all_ranks(make, dist.get_world_size(), **options) if rank == 0 else None]
    dist.broadcast_object_list(box)
    run, losses = box[0]
    return replace(run, losses=losses[rank])


def play_all_ranks(
    make: MakeModel, world_size: int, *, steps: int = STEPS, accumulate: int = 1, clip: float | None = None,
    reduce_at: str = "window", optimizer: MakeOptimizer = adamw, follow: Follow | None = None,
) -> tuple[Run, list[list[float]]]:  # fmt: skip
    """Train without any distribution: one replica plays each rank, gradients are summed in rank order.

    The optimizer steps master copies (fp32 where a parameter has 16 bits). Buffers are those of rank 0, which are
    copied to all before the first micro-batch of a window, as DDP does. Returns the run and the losses of each rank.
    """
    replicas = [make(0) for _ in range(world_size)]
    masters = [
        (name, nn.Parameter(p.detach().to(master_dtype(p), copy=True), p.requires_grad))
        for name, p in replicas[0].named_parameters()
    ]
    chosen = optimizer(masters)
    after = follow(chosen, masters) if follow is not None else None
    losses: list[list[float]] = [[] for _ in replicas]
    norms = []
    for step in range(steps):
        for replica in replicas[1:]:
            for buffer, source in zip(replica.buffers(), replicas[0].buffers(), strict=True):
                buffer.copy_(source)
        gradients = [[gradients_of(r, replica, step, micro, accumulate) for micro in range(accumulate)]
                     for r, replica in enumerate(replicas)]  # fmt: skip
        for rank, row in enumerate(gradients):
            losses[rank] += [loss for loss, _ in row]
        for index, (_, master) in enumerate(masters):
            parts = [[grads[index] for _, grads in row] for row in gradients]
            if reduce_at == "window":
                total = mean_of(map(total_of, parts), world_size)
            else:
                total = total_of(mean_of(ranks, world_size) for ranks in zip(*parts, strict=True))
            master.grad = total
        if clip is not None:
            norms.append(clip_by_norm([p.grad for _, p in masters if p.grad is not None], clip))
        chosen.step()
        with torch.no_grad():
            for replica in replicas:
                for p, (_, master) in zip(replica.parameters(), masters, strict=True):
                    p.copy_(master)
        if after is not None:
            after()
    return finish(replicas[0], [], norms, chosen.state_dict()), losses


def master_dtype(p: Tensor) -> torch.dtype:
    return torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype


def gradients_of(
    rank: int, replica: Model, step: int, micro: int, accumulate: int
) -> tuple[float, list[Tensor | None]]:
    """Loss and gradients of one rank's micro-batch, dense and in the masters' dtype."""
    loss = replica.loss(seeded(replica, rank, step * accumulate + micro))
    replica.zero_grad()
    (loss / accumulate).backward()
    grads = [p.grad for p in replica.parameters()]
    return loss.item(), [
        None if g is None else (g.to_dense() if g.is_sparse else g).to(master_dtype(g), copy=True) for g in grads
    ]


def total_of(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The sum from left to right of what is there."""
    total = None
    for part in present(parts):
        total = part.clone() if total is None else total.add_(part)
    return total


def mean_of(parts: Iterable[Tensor | None], world_size: int) -> Tensor | None:
    """The mean over the ranks: their sum, in rank order, times 1/N. None where no rank has anything."""
    total = total_of(parts)
    return None if total is None else total.mul_(1.0 / world_size)


def present(parts: Iterable[Tensor | None]) -> Iterator[Tensor]:
    return (part for part in parts if part is not None)
