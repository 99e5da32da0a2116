"""A parameter whose values are not here: what it still answers, what gathers it, what refuses; nothing crashes."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from harness import distributed
from oracles import adamw, build_engine, communicator, engine_step, plain, seeded

from lightning_zero.engine import gathered

SHARDED = "blocks.1.lin.weight"


def backward(engine, model, rank, step=0):
    with engine.forward():
        loss = model.loss(seeded(model, rank, step))
    with engine.backward():
        loss.backward()


@distributed(world_size=2)
def test_metadata_stays_true_while_sharded(rank, world_size):
    whole, model = zoo.make("Scalars"), zoo.make("Scalars")
    objects = dict(model.named_parameters())
    with communicator() as comm:
        engine = build_engine(model, comm, stage=3)
        backward(engine, model, rank)
        assert list(dict(model.named_parameters())) == list(objects)
        for (name, p), plain in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert p is objects[name] and isinstance(p, torch.nn.Parameter)
            assert p.shape == plain.shape and p.ndim == plain.dim() == p.dim() and p.numel() == plain.numel()
            assert (p.dtype, p.device, p.layout, p.stride()) == (
                plain.dtype,
                plain.device,
                plain.layout,
                plain.stride(),
            )
            assert p.size() == plain.size() and p.element_size() == 4 and p.nbytes == plain.nbytes
            assert p.is_leaf and p.requires_grad and p.is_floating_point() and not p.is_complex() and p.grad_fn is None
            assert p.is_contiguous() and torch.is_tensor(p) and torch.is_floating_point(p)
            assert hash(p) == id(p) and p in {objects[name]: 1}
            assert "Parameter" in repr(p)
            if p.ndim:
                assert len(p) == len(plain)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in whole.parameters())
        assert repr(model) == repr(whole)
        model.blocks[0].requires_grad_(False)
        assert not model.blocks[0].lin.weight.requires_grad
        model.blocks[0].requires_grad_(True)
        engine.release(whole=True)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


READS = {
    "arithmetic": lambda p: p + 1,
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "equal": lambda p: torch.equal(p, p),
    "numpy": lambda p: p.detach().numpy(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "float": lambda p: float(p.sum()),
    "to": lambda p: p.to(torch.float64),
    "cat": lambda p: torch.cat([torch.zeros(1, zoo.DIM), p]),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "collective": lambda p: dist.broadcast(p, 0),
    "iteration": lambda p: list(p),
    "data": lambda p: p.data + 1,
    "copy_": lambda p: p.data.copy_(torch.zeros(zoo.DIM, zoo.DIM)),
    "fill": lambda p: torch.nn.init.zeros_(p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
}


@distributed(world_size=2)
@pytest.mark.parametrize("read", READS)
def test_a_read_outside_a_step_says_what_to_do(rank, world_size, read):
    model = zoo.make("Blocks")
    with communicator() as comm:
        engine = build_engine(model, comm, stage=3)
        parameter = model.get_parameter(SHARDED)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"{SHARDED}[\s\S]*lightning_zero\.gathered"):
                READS[read](parameter)
            backward(engine, model, rank)
        engine.release(whole=True)


@distributed(world_size=2)
def test_state_dict_outside_a_step_refuses(rank, world_size):
    model = zoo.make("Blocks")
    with communicator() as comm:
        engine = build_engine(model, comm, stage=3)
        for call in (
            model.state_dict,
            partial(copy.deepcopy, model),
            partial(model.load_state_dict, zoo.make("Blocks").state_dict()),
        ):
            with pytest.raises(RuntimeError, match=r"lightning_zero\.gathered"):
                call()
        engine.release(whole=True)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gathered_reads_the_present_and_keeps_rank_0s_writes(rank, world_size, stage):
    model = zoo.make("Blocks")
    make = partial(zoo.make, "Blocks")
    with communicator() as comm:
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        engine_step(engine, model, optimizer, comm, 0)
        want = plain(make, steps=1)
        with gathered(model):
            for name, value in model.state_dict().items():
                assert torch.equal(value, want.weights[name]), name
            assert type(model.get_parameter(SHARDED)) is torch.nn.Parameter
            with torch.no_grad():
                model.get_parameter(SHARDED).fill_(rank + 7.0)
                model.head.weight.mul_(2.0)
        with gathered(model.blocks[1]):
            assert (model.get_parameter(SHARDED) == 7.0).all()
        engine_step(engine, model, optimizer, comm, 1)
        engine.release(whole=True)
        expected = make(0)
        expected.load_state_dict(want.weights)
        moved = (model.get_parameter(SHARDED) - 7.0).abs()
        assert 0 < moved.max() < 0.1, "the write was lost or the step was"
        assert torch.allclose(model.head.weight, 2 * want.weights["head.weight"], atol=0.05)


@distributed(world_size=2)
def test_gathered_of_a_part_leaves_the_rest_sharded(rank, world_size):
    model = zoo.make("Blocks")
    with communicator() as comm:
        engine = build_engine(model, comm, stage=3)
        with gathered(model.blocks[1]):
            model.get_parameter(SHARDED).sum().item()
            with pytest.raises(RuntimeError, match="blocks.2.lin.weight"):
                model.blocks[2].lin.weight.sum()
        with pytest.raises(RuntimeError, match=SHARDED):
            model.get_parameter(SHARDED).sum()
        engine.release(whole=True)


@distributed(world_size=2)
def test_gathered_in_16_bit_compute_shows_the_parameters_and_writes_the_masters(rank, world_size):
    model = zoo.make("Blocks")
    with communicator() as comm:
        for stage in (1, 3):
            engine = build_engine(model, comm, autocast=True, stage=stage)
            value = 1.0009765625  # not a number of bf16
            with gathered(model), torch.no_grad():
                model.get_parameter(SHARDED).fill_(value)
                model.stem.bias.fill_(value)
            engine.release(whole=True)
            assert model.get_parameter(SHARDED).dtype == torch.float32
            assert (model.stem.bias - value).abs().max() < 0.01 and (
                model.get_parameter(SHARDED) - value
            ).abs().max() < 0.01


class Clamping(zoo.Blocks):
    """Changes a weight in place before the block that owns it runs."""

    def forward(self, x):
        with torch.no_grad():
            self.blocks[1].lin.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_write_inside_a_step_is_kept(rank, world_size, stage):
    torch.manual_seed(0)
    model = Clamping()
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    want[SHARDED].clamp_(-0.05, 0.05)
    with communicator() as comm:
        engine = build_engine(model, comm, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(2):
            engine_step(engine, model, optimizer, comm, step)
        engine.release(whole=True)
    for name, p in model.named_parameters():
        assert torch.equal(p, want[name]), name


@distributed(world_size=2)
def test_a_write_by_the_block_itself_is_kept(rank, world_size):
    class Centring(zoo.Blocks):
        class block(zoo.Block):
            def forward(self, x):
                with torch.no_grad():
                    self.lin.weight.sub_(self.lin.weight.mean())
                return super().forward(x)

    with communicator() as comm:
        for stage in (1, 3):
            torch.manual_seed(rank)
            model = Centring()
            engine = build_engine(model, comm, stage=stage)
            engine_step(engine, model, torch.optim.SGD(model.parameters(), lr=0.0), comm, 0)
            engine.release(whole=True)
            assert all(block.lin.weight.mean().abs() < 1e-7 for block in model.blocks), f"stage {stage}"


@distributed(world_size=2)
def test_optimizers_are_built_on_sharded_parameters(rank, world_size):
    elementwise = (
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
    with communicator() as comm:
        for stage in (1, 3):
            model = zoo.make("Blocks", rank)
            engine = build_engine(model, comm, stage=stage)
            backward(engine, model, rank)
            for make in elementwise:
                optimizer = make(model.parameters(), lr=0.0)
                assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
            with pytest.raises(ValueError, match="more than one parameter group"):
                torch.optim.SGD([{"params": [model.stem.weight]}, {"params": [model.stem.weight]}])
            engine.release(whole=True)


@distributed(world_size=2)
def test_readers_in_cpp_get_nan_and_do_not_crash(rank, world_size):
    model = zoo.make("Blocks")
    with communicator() as comm:
        engine = build_engine(model, comm, stage=3)
        parameter = model.get_parameter(SHARDED)
        for _ in range(2):
            assert torch.tensor(parameter).isnan().all()
            with torch._C.DisableTorchFunctionSubclass():
                assert (parameter + 1).isnan().all()
            backward(engine, model, rank)
        engine.release(whole=True)
        assert parameter.isfinite().all()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_over_a_graph_older_than_the_step_raises(rank, world_size, stage):
    model = zoo.make("Blocks")
    with communicator() as comm:
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        with engine.forward():
            old = model.loss(seeded(model, rank, 0))
        with engine.backward():
            old.backward(retain_graph=True)
        engine.step(optimizer)
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified"), engine.backward():
            old.backward()
        engine.release(whole=False)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["Blocks", "Unused", "Branchy", "Tied"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_grad_is_the_whole_mean_and_none_stays_none(rank, world_size, name, accumulate):
    """``p.grad`` as DDP's, lazily: metadata without communication, values as a collective, writes into the shards."""
    models = [zoo.make(name) for _ in range(world_size)]
    for peer, model in enumerate(models):
        for micro in range(accumulate):
            model.loss(seeded(model, peer, micro)).backward()
    want = {}
    for key, _ in models[0].named_parameters():
        parts = [g for g in (dict(m.named_parameters())[key].grad for m in models) if g is not None]
        want[key] = sum(parts) / world_size if parts else None
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = zoo.make(name)
            engine = build_engine(model, comm, stage=stage, reduce_at="window")
            for micro in range(accumulate):
                with engine.forward():
                    loss = model.loss(seeded(model, rank, micro))
                with engine.backward(last=micro == accumulate - 1):
                    loss.backward()
            before = dict(comm.traffic)
            for key, p in model.named_parameters():
                assert (p.grad is None) == (want[key] is None), f"stage {stage}: {key}"
                if p.grad is not None:
                    assert p.grad.shape == p.shape and p.grad.dtype == p.dtype and p.grad.device == p.device
            assert comm.traffic == before, "a look at metadata has communicated"
            for key, p in model.named_parameters():
                if p.grad is not None:
                    assert torch.equal(p.grad + 0, want[key]), f"stage {stage}: {key}"
                    assert p.grad.norm().item() == want[key].norm().item()
                    p.grad.mul_(2)
                    assert torch.equal(p.grad.clone(), 2 * want[key]), f"stage {stage}: {key} lost a write"
            engine.release(whole=True)


@distributed(world_size=2)
def test_gradients_may_be_replaced(rank, world_size):
    """Assigning a tensor to ``p.grad`` is what the step then uses."""
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = zoo.make("Blocks")
            start = model.get_parameter(SHARDED).detach().clone()
            engine = build_engine(model, comm, stage=stage)
            backward(engine, model, rank)
            model.get_parameter(SHARDED).grad = torch.ones(zoo.DIM, zoo.DIM)
            engine.step(torch.optim.SGD(model.parameters(), lr=1.0))
            engine.release(whole=True)
            assert torch.equal(model.get_parameter(SHARDED).detach(), start - 1), f"stage {stage}"


@distributed(world_size=2)
def test_release_leaves_plain_modules(rank, world_size):
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = zoo.make("Gpt", rank)
            engine = build_engine(model, comm, autocast=True, stage=stage)
            engine_step(engine, model, adamw(model.named_parameters()), comm, 0, autocast=True)
            engine.release(whole=True)
            for module in model.modules():
                assert not any(
                    (
                        module._forward_hooks,
                        module._forward_pre_hooks,
                        module._backward_hooks,
                        module._backward_pre_hooks,
                    )
                )
            for p in model.parameters():
                assert type(p) is torch.nn.Parameter and p.dtype == torch.float32 and p.grad is None
                assert not p._backward_hooks and not p._post_accumulate_grad_hooks
                assert p.untyped_storage().nbytes() >= p.nbytes
            copied = copy.deepcopy(model)
            assert pickle.loads(pickle.dumps(model)).loss(seeded(model, 0, 0)) == copied.loss(seeded(model, 0, 0))
            model.loss(seeded(model, rank, 0)).backward()
            adamw(model.named_parameters()).step()


@distributed(world_size=2)
def test_named_full_parameters(rank, world_size):
    """Whole values come to rank 0 in the user's dtype, each parameter once; the others get none."""
    make = partial(zoo.make, "Tied")
    want = plain(make, steps=2)
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = make(rank)
            engine = build_engine(model, comm, stage=stage)
            optimizer = adamw(model.named_parameters())
            for step in range(2):
                engine_step(engine, model, optimizer, comm, step)
            found = {id(p): value for p, value in engine.named_full_parameters()}
            assert set(found) == {id(p) for p in model.parameters()}
            for name, p in model.named_parameters():
                assert torch.equal(found[id(p)], want.weights[name]) if rank == 0 else found[id(p)] is None
            engine.load_parameters({id(p): torch.full(p.shape, 0.5) for p in model.parameters()})
            engine.release(whole=True)
            assert all((p == 0.5).all() for p in model.parameters())
