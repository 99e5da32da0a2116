"""Ranks that agree, and ranks that part: an error on every rank that is left, soon, with rank and unit; no hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import zoo
from harness import RankFailed, distributed, run_ranks
from oracles import adamw, build_engine, communicator, engine_step, seeded

SOON = 15.0  # seconds after which an error counts as a hang


@distributed(world_size=[1, 2, 3])
def test_broadcast(rank, world_size):
    tensors = [
        torch.full((3, 2), float(rank)),
        torch.tensor(rank),
        torch.tensor([rank > 0]),
        torch.empty(0),
        torch.full((2, 2), rank).t(),
    ]
    tensors += [torch.full((2,), rank, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64, torch.uint8)]
    with communicator() as comm:
        for tensor in tensors:
            comm.broadcast_(tensor, src=world_size - 1)
    for tensor in tensors[:2] + tensors[4:]:
        assert (tensor == world_size - 1).all()
    assert tensors[2].item() == (world_size > 1)


@distributed(world_size=[1, 2, 3, 4, 5, 6])
def test_all_reduce(rank, world_size):
    """The same bits on all ranks: a sum is taken in rank order."""
    numbers = torch.rand(world_size, 7, generator=torch.Generator().manual_seed(0))
    with communicator() as comm:
        for op, want in (("max", numbers.amax(0)), ("sum", numbers.sum(0))):
            got = numbers[rank].clone()
            comm.all_reduce(got, op, f"test of {op}").wait()
            assert torch.equal(got, want)
        comm.all_reduce(torch.empty(0), "sum", "nothing").wait()
        assert comm.traffic["control"] == 2 * 7 * (world_size - 1)


@distributed(world_size=[1, 3])
def test_agree(rank, world_size):
    with communicator() as comm:
        comm.agree(None)
        last = world_size - 1
        with pytest.raises(RuntimeError, match=rf"rank {last}: disk {last} is full"):
            comm.agree(f"disk {rank} is full" if rank == last else None)
        with pytest.raises(RuntimeError) as error:
            comm.agree(f"reason {rank}")
        assert all(f"rank {r}: reason {r}" in str(error.value) for r in range(world_size))
        comm.agree(None)


def train_until(rank, comm, act, stage, model="Blocks", steps=4):
    """Train; in step 2 ``act(rank)`` is called inside the forward of the middle block."""
    module = zoo.make(model)
    engine = build_engine(module, comm, stage=stage)
    optimizer = adamw(module.named_parameters())
    now = [0]
    module.blocks[1].register_forward_pre_hook(lambda *_: act(rank) if now[0] == 2 else None)
    for step in range(steps):
        now[0] = step
        engine_step(engine, module, optimizer, comm, step)
    engine.release(whole=True)


def errors_of_survivors(act, stage, world_size=3, **options):
    """What the ranks say after one of them did ``act``; fails if a rank hangs."""

    def body(rank, world_size):
        with communicator() as comm:
            train_until(rank, comm, act, stage, **options)

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, world_size, timeout=2 * SOON, grace=SOON)
    text = str(failure.value)
    assert "was here" not in text, f"a rank hangs: {text}"
    return text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_dies_is_missed(stage):
    def dies(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    text = errors_of_survivors(dies, stage)
    assert "rank 1 died" in text
    for survivor in (0, 2):
        own = text.partition(f"--- rank {survivor} failed")[2].partition("---")[0]
        assert "PeerError" in own and f"Rank {survivor}" in own and "step 2" in own
        assert "blocks." in own or "(root)" in own or "end of backward" in own, "no unit is named"


def meet_at_rank_0(rank, world_size):
    """Begin again with the usual kind of store, which lives in rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else None]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], world_size, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def test_the_rank_with_the_store_dies():
    def dies(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def body(rank, world_size):
        meet_at_rank_0(rank, world_size)
        with communicator() as comm:
            train_until(rank, comm, dies, stage=3)

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, 3, timeout=2 * SOON, grace=SOON)
    text = str(failure.value)
    assert "was here" not in text, f"a rank hangs: {text}"
    for survivor in (1, 2):
        assert "PeerError" in text.partition(f"--- rank {survivor} failed")[2].partition("---")[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_words_of_a_rank_that_fails_reach_the_others(stage):
    def body(rank, world_size):
        def fails(rank):
            if rank == 1:
                comm.fail("no such file: data.bin")
                raise FileNotFoundError("data.bin")

        with communicator() as comm:
            train_until(rank, comm, fails, stage)

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, 2, timeout=2 * SOON, grace=SOON)
    text = str(failure.value)
    assert "was here" not in text, f"a rank hangs: {text}"
    assert "rank 1 failed: no such file: data.bin" in text.partition("--- rank 0 failed")[2]


def test_ranks_that_take_different_branches_are_told_where():
    """At stage 3 all ranks must run the same units."""

    def body(rank, world_size):
        with communicator() as comm:
            model = zoo.make("Blocks")
            engine = build_engine(model, comm, stage=3)
            optimizer = adamw(model.named_parameters())
            for step in range(2):
                engine_step(engine, model, optimizer, comm, step)
            with engine.forward():
                x = model.stem(torch.ones(1, zoo.DIM))
                for index in (0, 1, 2) if rank else (0, 2, 1):
                    x = model.blocks[index](x)
                loss = model.head(x).sum()
            with engine.backward():
                loss.backward()
            engine.step(optimizer)

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, 2, timeout=2 * SOON, grace=SOON)
    text = str(failure.value)
    assert "was here" not in text, f"a rank hangs: {text}"
    for words in ("rank 0: waits for", "rank 1: waits for", "blocks.", "step 2"):
        assert words in text
    assert all("PeerError" in part for part in text.split("--- rank")[1:]), text


@pytest.mark.parametrize("stage", [1, 3])
def test_one_batch_more_on_one_rank(stage):
    """The rank with the extra step gets an error, whether the other has left or sits in something else."""

    def body(rank, world_size):
        with communicator() as comm:
            model = zoo.make("Blocks")
            engine = build_engine(model, comm, stage=stage)
            optimizer = adamw(model.named_parameters())
            for step in range(2 + (rank == 0)):
                engine_step(engine, model, optimizer, comm, step)
            if rank:
                comm.agree(None)  # where the other rank never comes

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, 2, timeout=2 * SOON, grace=SOON)
    text = str(failure.value)
    assert "was here" not in text, f"a rank hangs: {text}"
    assert "step 2" in text.partition("--- rank 0 failed")[2]


def test_ranks_that_ask_each_other_different_things_are_told():
    """gloo's own collectives take other sizes for a reason to abort, and the same size for an answer."""

    def body(rank, world_size):
        with communicator() as comm:
            comm.all_reduce(torch.zeros(1 + 7 * rank), "max", f"question {rank}").wait()

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, 2, timeout=2 * SOON, grace=SOON)
    text = str(failure.value)
    assert "was here" not in text and "died" not in text, text
    assert "rank 0: waits for 'question 0'" in text and "rank 1: waits for 'question 1'" in text


@distributed(world_size=2)
def test_a_slow_rank_is_waited_for(rank, world_size):
    """Slowness alone is no error, in any operation: compiling, saving and loading data take their time."""

    def sleeps(rank):
        if rank == 1:
            time.sleep(4)  # several of the waiting rank's looks at its peers

    with communicator() as comm:
        train_until(rank, comm, sleeps, stage=3)


@distributed(world_size=2)
def test_an_exception_leaves_the_engine_releasable(rank, world_size):
    """All ranks raise in their forward: without a collective the module loses its hooks and guards."""
    with communicator() as comm:
        for stage in (1, 3):
            model = zoo.make("Blocks")
            engine = build_engine(model, comm, stage=stage)
            handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError), engine.forward():
                model.loss(seeded(model, rank, 0))
            handle.remove()
            engine.release(whole=False)
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
            again = zoo.make("Blocks")
            engine_step(build_engine(again, comm, stage=stage), again, adamw(again.named_parameters()), comm, 0)
