"""What users of sharded training have run into elsewhere: small models in which each such fault would show."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import get_args

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from harness import distributed
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_INT, _PRECISION_INPUT_STR
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from oracles import assert_same, assert_same_state, communicator, plain, play_all_ranks, train_ddp, train_engine
from test_parity import assert_stages_equal_plain
from test_precision import assert_equal, precision
from test_strategy import DIM, Net, fitted, is_plain, loader, trainer, zero
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import PeerError

STAGES = (1, 2, 3)


def build(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


def check(kind, stages=(0, *STAGES), **options):
    """Runs of all stages are the plain loop's to the bit, and those of DDP where two ranks leave one order of sums."""
    make = partial(build, kind)
    with communicator() as comm:
        run = assert_stages_equal_plain(comm, make, stages, **options)
    if dist.get_world_size() == 2:
        assert_same(run, train_ddp(make, dist.get_rank(), **options), "not DDP")
    return run


# Sums, norms and groups


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_unit_sizes_and_prefetch_change_no_bit_of_an_accumulated_run(rank, world_size, stage):
    make = partial(zoo.make, "Wide")
    whole = 4 * sum(p.numel() for p in make().parameters())
    sizes = [{"max_unit_bytes": 1}, {"max_unit_bytes": 7}, {"min_unit_bytes": 1000, "max_unit_bytes": 1000}]
    sizes += [{"min_unit_bytes": 5 * whole}]
    with communicator() as comm:
        want = plain(make, steps=3, accumulate=2, reduce_at="micro_batch")
        for size in sizes:
            for prefetch in (0, 50) if stage == 3 else (1,):
                settings = {"stage": stage, "reduce_at": "micro_batch", "prefetch": prefetch, **size}
                assert_same(train_engine(make, comm, steps=3, accumulate=2, **settings), want, str(settings))


class OneHugeElement(zoo.Blocks):
    """In the last rank's shard of the root unit, or in the first one's."""

    where = -1

    def batch(self, rank, step):
        return super().batch(0, step)  # the same on all ranks: the gradient does not depend on their number

    def loss(self, batch):
        return super().loss(batch) + 1e4 * (self.head if self.where else self.stem).weight.flatten()[self.where]


class OneHugeElementInFront(OneHugeElement):
    where = 0


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("kind", [OneHugeElement, OneHugeElementInFront])
def test_the_norm_counts_an_element_wherever_it_lies(rank, world_size, kind):
    run = check(kind, clip=1.0, steps=2)
    alone, _ = play_all_ranks(partial(build, kind), 1, clip=1.0, steps=2)
    assert min(run.norms) > 1e4 * 0.99
    assert run.norms == pytest.approx(alone.norms, rel=1e-6)  # a mean over three ranks is rounded


class Descent(Net):
    """Plain gradient descent; the loss of each step is kept."""

    lr = 1.0

    def __init__(self, seed=0):
        super().__init__(seed)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class AdamDescent(Descent):
    configure_optimizers = Net.configure_optimizers


def own_data(rank, world_size, folder, strategy, **kwargs):
    """A Trainer whose ranks have loaders of their own."""
    return trainer(rank, world_size, folder, strategy, use_distributed_sampler=False, **kwargs)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_norm_does_not_depend_on_how_16_samples_are_cut(rank, world_size, name, tmp_path):
    """One batch or four micro-batches; fp32 sums have two orders, and bf16 rounds each micro-batch to 8 bits."""
    reference = Net()
    reference.training_step(next(iter(loader(16, 16))), 0).backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
    whole = set()
    for stage in (0, *STAGES):
        for accumulate in (1, 4):
            model = Descent()
            model.lr = 0.0
            run = trainer(
                rank, world_size, tmp_path, zero(stage), precision=name, gradient_clip_val=1e9,
                accumulate_grad_batches=accumulate,
            )  # fmt: skip
            run.fit(model, loader(16, 8 // accumulate))
            assert run.global_step == 1
            norm = run.strategy.gradient_norm
            assert norm.before == norm.after
            assert norm.before.item() == pytest.approx(want, rel=1e-5 if name == "32-true" else 0.02), (stage, name)
            if accumulate == 1:
                whole.add(norm.before.item())
    assert len(whole) == 1


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"])
def test_a_step_is_as_long_as_the_limit_of_clipping(rank, world_size, name, tmp_path):
    start = Descent().state_dict()
    for stage in (0, *STAGES):
        model = fitted(
            rank, world_size, tmp_path, zero(stage), Descent(), max_steps=1, gradient_clip_val=1e-3, **precision(name)
        )
        moved = torch.cat([(value - start[key]).flatten() for key, value in model.state_dict().items()]).norm().item()
        assert moved == pytest.approx(1e-3, rel=2e-3), stage  # weights near 0.3 have steps of 3e-8


@distributed(world_size=2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_losses_are_those_of_a_plain_loop(rank, world_size, accumulate, tmp_path):
    data = list(loader(40))
    model, want = Net(), []
    optimizer = model.configure_optimizers()
    for step in range(10 // accumulate):
        sums = []
        for peer in range(world_size):
            optimizer.zero_grad()
            for index in range(step * accumulate, (step + 1) * accumulate):
                loss = model.training_step(data[world_size * index + peer], index)
                (loss / accumulate).backward()
                want += [loss.item()] if peer == rank else []
            sums.append([p.grad.clone() for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *sums, strict=True):
            p.grad = sum(grads) * (1 / world_size)
        optimizer.step()
    for stage in (0, *STAGES):
        model = AdamDescent()
        strategy, own = zero(stage, reduce_at="window"), DataLoader(data[rank::world_size], batch_size=None)
        own_data(rank, world_size, tmp_path, strategy, accumulate_grad_batches=accumulate).fit(model, own)
        assert model.losses == want and len(set(want)) == 10, f"stage {stage}"


class Normed(Net):
    """Logs the norm of each gradient, as Lightning's documentation says."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        self.norms.append({name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()})


@distributed(world_size=2)
def test_norms_of_single_gradients_are_those_of_ddp(rank, world_size, tmp_path):
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), Normed()).norms
    assert len(want) == 4 and len(want[0]) > 10
    for stage in STAGES:
        assert fitted(rank, world_size, tmp_path, zero(stage), Normed()).norms == want, f"stage {stage}"


class InGroups(Net):
    def configure_optimizers(self):
        groups = [
            {"params": self.blocks.parameters(), "lr": 1e-1},
            {"params": [p for name, p in self.named_parameters() if not name.startswith("blocks")], "lr": 1e-3},
        ]
        optimizer = torch.optim.SGD(groups)
        rates = [lambda step: 1 / (1 + step), lambda step: 1.1**step]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@distributed(world_size=2)
def test_groups_with_rates_of_their_own_that_a_scheduler_moves(rank, world_size, tmp_path):
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), InGroups())
    assert want.trainer.optimizers[0].param_groups[1]["lr"] == 1e-3 * 1.1**4
    for stage in STAGES:
        assert_equal(fitted(rank, world_size, tmp_path, zero(stage), InGroups()).state_dict(), want.state_dict())


@distributed(world_size=2)
def test_a_group_split_in_two_equal_ones_changes_no_bit(rank, world_size):
    def one(named):
        return torch.optim.AdamW([p for _, p in named], lr=0.01)

    def two(named):
        parameters = [p for _, p in named]
        return torch.optim.AdamW([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=0.01)

    make = partial(zoo.make, "Gpt")
    with communicator() as comm:
        for stage in STAGES:
            runs = [train_engine(make, comm, stage=stage, optimizer=groups, clip=0.5) for groups in (one, two)]
            assert_same(*runs, f"stage {stage}")
            assert runs[0].norms == runs[1].norms


@distributed(world_size=2)
def test_adams_state_of_what_is_skipped_in_a_step_stays(rank, world_size):
    make = partial(zoo.make, "Alternating")
    want = plain(make)
    with communicator() as comm:
        for stage in STAGES:
            run = train_engine(make, comm, stage=stage, with_state=True)
            assert_same(run, want, f"stage {stage}", buffers=rank == 0)
            if rank == 0:
                assert_same_state(run.state["state"], dict(sorted(want.state["state"].items())))
                assert {int(state["step"]) for state in run.state["state"].values()} == {4, 6}


# Layers


class TiedVocabulary(zoo.Model):
    """A head that is the embedding, of a size that no number of ranks divides."""

    vocabulary = 7

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(self.vocabulary, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, self.vocabulary, bias=False)
        self.head.weight = self.token.weight

    def batch(self, rank, step):
        x, y = torch.randint(self.vocabulary, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        return zoo.Batch(x, y, rank, step)

    def loss(self, batch):
        x = self.token(batch.x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.cross_entropy(self.head(x), batch.y)


class TiedSmallVocabulary(TiedVocabulary):
    vocabulary = 5


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("kind", [TiedVocabulary, TiedSmallVocabulary])
def test_every_element_of_a_tied_embedding_of_odd_size_is_trained(rank, world_size, kind):
    run = check(kind)
    assert ((run.weights["token.weight"] - build(kind).token.weight).abs() > 1e-3).all()


class IdleSibling(zoo.Blocks):
    """Blocks add the bias of layers that nobody calls."""

    unused = True

    def __init__(self):
        super().__init__()
        self.idle = nn.ModuleList(nn.Linear(zoo.DIM, zoo.DIM) for _ in range(3))

    def body(self, x):
        for block, idle in zip(self.blocks, self.idle, strict=True):
            x = block(x) + idle.bias
        return x


class EverySecondFrozen(zoo.ZOO["Gpt"]):
    def __init__(self):
        super().__init__()
        for parameter in list(self.parameters())[::2]:
            parameter.requires_grad_(False)


class EmptyLayers(zoo.Blocks):
    """Layers without a single weight, in the middle and at the end."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has nothing to initialise
            self.blocks.insert(1, nn.Linear(zoo.DIM, 0, bias=False))
            self.blocks.append(nn.Linear(zoo.DIM, 0, bias=False))

    def body(self, x):
        for block in self.blocks:
            out = block(x)
            x = out if out.numel() else x + out.sum()
        return x


@distributed(world_size=2)
@pytest.mark.parametrize("kind", [IdleSibling, EverySecondFrozen])
def test_layers_that_are_only_read_and_layers_half_frozen(rank, world_size, kind):
    check(kind, steps=3)


@distributed(world_size=[1, 2])
def test_layers_without_elements(rank, world_size):
    run = check(EmptyLayers, steps=3)
    assert run.weights["blocks.1.weight"].shape == run.weights["blocks.4.weight"].shape == (0, zoo.DIM)


class ThreeElements(zoo.Model):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x):
        return x[:, :3] * self.gain

    def loss(self, batch):
        return F.mse_loss(self(batch.x), batch.y[:, :3])


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_more_ranks_than_elements(rank, world_size, kind):
    check(ThreeElements, optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=0.1, **{kind: True}))


# Ranks with other parts of the model


class OneExpertEach(zoo.Blocks):
    """Rank 0 uses the first expert only, rank 1 the second."""

    unused = True

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(zoo.DIM, zoo.DIM) for _ in range(2))

        def forward(self, x):
            return x + torch.tanh(self.experts[self.chosen](x))

    def loss(self, batch):
        for block in self.blocks:
            block.chosen = batch.rank
        return super().loss(batch)


class SomeImages(zoo.Blocks):
    """Rank 1 has no images in its second batch, and skips the tower that sees them."""

    unused = True

    class Vision(nn.Sequential):
        def __init__(self):
            super().__init__(*(zoo.Block() for _ in range(3)))

    def __init__(self):
        super().__init__()
        self.vision = self.Vision()

    def loss(self, batch):
        x = self.stem(batch.x)
        if (batch.rank, batch.step) != (1, 1):
            x = x + self.vision(batch.y)
        return F.mse_loss(self.head(self.body(x)), batch.y)


class SomeImagesAsOneUnit(SomeImages):
    """The branch is inside of the module that is one unit: all ranks run that."""

    config = {"leaf_classes": ("Vision",)}

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = SomeImages.Vision()

        def forward(self, x, images):
            return x if images is None else x + self.tower(images)

    def loss(self, batch):
        x = self.vision(self.stem(batch.x), None if (batch.rank, batch.step) == (1, 1) else batch.y)
        return F.mse_loss(self.head(self.body(x)), batch.y)


@distributed(world_size=2)
@pytest.mark.parametrize("kind", [OneExpertEach, SomeImagesAsOneUnit])
def test_ranks_may_use_other_parts_of_a_unit(rank, world_size, kind):
    check(kind, steps=3)


@distributed(world_size=2)
def test_ranks_may_skip_units_below_stage_3(rank, world_size):
    check(SomeImages, stages=(0, 1, 2), steps=3)


@distributed(world_size=2, timeout=30)
def test_a_unit_that_one_rank_skips_is_an_error_at_stage_3(rank, world_size):
    with communicator() as comm, pytest.raises(PeerError, match=r"vision\.\d.* in step 1"):
        train_engine(partial(build, SomeImages), comm, stage=3)


# Recomputation


class SiameseCheckpointed(zoo.Blocks):
    """One encoder, recomputed in backward, sees two inputs in one forward."""

    reentrant = False

    def body(self, x):
        return checkpoint(super().body, x, use_reentrant=self.reentrant)

    def loss(self, batch):
        return F.mse_loss(self(batch.x), self(batch.y)) + F.mse_loss(self(-batch.x), batch.y)


class SiameseReentrant(SiameseCheckpointed):
    reentrant = True
    not_for_ddp = "marks a parameter ready twice"
    late_gradients = True


class AdaptedCheckpointed(zoo.Blocks):
    """Recomputed blocks of which only a small adapter is trained."""

    reentrant = False

    class block(zoo.Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(zoo.DIM)
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(zoo.DIM, 2), nn.Linear(2, zoo.DIM)

        def forward(self, x):
            return super().forward(self.norm(x)) + self.up(self.down(x))

    def body(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class AdaptedReentrant(AdaptedCheckpointed):
    reentrant = True


@distributed(world_size=2)
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [SiameseCheckpointed, SiameseReentrant, AdaptedCheckpointed, AdaptedReentrant])
def test_recomputed_parts_that_run_twice_or_are_frozen(rank, world_size, kind, accumulate):
    for reduce_at in ("window", "micro_batch")[: 1 if accumulate == 1 else 2]:
        options = {"accumulate": accumulate, "steps": 3}
        with communicator() as comm:
            make = partial(build, kind)
            want = plain(make, reduce_at=reduce_at, **options)
            runs = [train_engine(make, comm, stage=s, reduce_at=reduce_at, **options) for s in (0, *STAGES)]
        for run in runs[1:]:
            assert_same(run, runs[0], f"two stages differ, {reduce_at}")
        for name, value in want.weights.items():
            exact = {"rtol": 1e-4, "atol": 1e-5} if kind.late_gradients else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(runs[0].weights[name], value, **exact)


# Steps in a Trainer


class Watch(Callback):
    """What happens in a step, in which order."""

    def __init__(self):
        self.events = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.events.append("zero_grad")

    def on_before_backward(self, trainer, pl_module, loss):
        self.events.append("backward")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.events.append("step")

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.events.append((trainer.global_step, [group["lr"] for group in trainer.optimizers[0].param_groups]))


@distributed(world_size=2)
def test_hooks_run_once_a_window_and_the_last_one_is_shorter(rank, world_size, tmp_path):
    def run(strategy, **kwargs):
        watch, model = Watch(), InGroups()
        runner = trainer(rank, world_size, tmp_path, strategy, callbacks=[watch, *kwargs.pop("more", [])], **kwargs)
        runner.fit(model, loader(40))
        return watch.events, model.state_dict()

    for kwargs in ({"accumulate_grad_batches": 4}, {"max_epochs": 3}):
        more = [] if "max_epochs" not in kwargs else [GradientAccumulationScheduler({0: 1, 2: 4})]
        events, state = run(DDPStrategy(), more=more, **kwargs)
        assert events.count("step") == (3 if not more else 10 + 10 + 3)
        for stage in STAGES:
            got = run(zero(stage, reduce_at="window"), more=more, **kwargs)
            assert got[0] == events, f"stage {stage}"
            assert_equal(got[1], state, f"stage {stage}")


class ByTokens(Net):
    """Manual accumulation, weighted by how many tokens the ranks' micro-batches have."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.tokens = torch.zeros(())

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer, last = self.optimizers(), batch_idx % 2 == 1
        self.tokens += len(x)
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(F.mse_loss(self(x), y, reduction="sum") * self.trainer.world_size)
        if last:
            dist.all_reduce(self.tokens)
            for p in self.parameters():
                p.grad /= self.tokens
            optimizer.step()
            optimizer.zero_grad()
            self.tokens.zero_()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@distributed(world_size=2)
def test_micro_batches_weighted_by_their_tokens_are_one_big_batch(rank, world_size, tmp_path):
    data = next(iter(loader(90, 90)))
    parts = list(zip(*(t.split([3, 30, 47, 10]) for t in data), strict=True))[2 * rank :][:2]
    want = ByTokens()
    F.mse_loss(want(data[0]), data[1]).backward()
    want.configure_optimizers().step()
    for stage in (0, *STAGES):
        model = ByTokens()
        own_data(rank, world_size, tmp_path, zero(stage)).fit(model, DataLoader(parts, batch_size=None))
        for name, value in model.state_dict().items():  # another order of sums
            torch.testing.assert_close(value, want.state_dict()[name], rtol=1e-5, atol=1e-6)


class Adversaries(Net):
    """A discriminator that steps with each batch and a generator that steps with every second one."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(1, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            if number and batch_idx % 2:
                continue
            self.toggle_optimizer(optimizer)
            fake = self(batch[0])
            verdict = self.judge(fake).mean()
            self.manual_backward(verdict if number else F.softplus(-verdict) + self.judge(batch[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        judge = list(self.judge.parameters())
        makers = [p for p in self.parameters() if not any(p is other for other in judge)]
        return torch.optim.SGD(judge, lr=0.01, momentum=0.9), torch.optim.AdamW(makers, lr=0.01)


@distributed(world_size=2)
def test_adversaries_with_steps_of_their_own_train_and_resume(rank, world_size, tmp_path):
    def run(strategy, epochs, seed=0, **kwargs):
        model, runner = Adversaries(seed), trainer(rank, world_size, tmp_path, strategy, max_epochs=epochs)
        runner.fit(model, loader(), **kwargs)
        return model.state_dict(), runner

    want, _ = run(DDPStrategy(find_unused_parameters=True), 2)
    for stage in STAGES:
        assert_equal(run(zero(stage), 2)[0], want, f"stage {stage}")
        path = tmp_path / f"{stage}.ckpt"
        run(zero(stage), 1)[1].save_checkpoint(path)
        assert_equal(run(zero(stage), 2, seed=1, ckpt_path=path)[0], want, f"stage {stage}, resumed")


# Data and precision


@dataclass
class Sample:
    x: torch.Tensor
    label: torch.Tensor


class Nested(Net):
    def training_step(self, batch, batch_idx):
        own = next(self.blocks.parameters()).dtype
        samples, more = batch["samples"], batch["more"]
        floats = [sample.x for sample in samples] + list(more["pair"])
        assert all(t.dtype == self.expected for t in floats) and (own == self.expected or not self.true)
        assert samples[0].label.dtype == torch.int64 and more["mask"].dtype == torch.bool and more["name"] == "a"
        x = torch.cat([sample.x for sample in samples]) * more["pair"][0] * more["mask"]
        return self(x).float().square().mean() + self.signs(samples[0].label).float().mean()


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["32-true", "bf16-true", "16-true", "bf16-mixed"])
def test_nested_batches_get_the_dtype_of_the_forward(rank, world_size, name, tmp_path):
    samples = [Sample(torch.full((2, DIM), value), torch.tensor([0, 1])) for value in (0.5, 2.0)]
    more = {"pair": (torch.ones(1), torch.zeros(2)), "mask": torch.ones(DIM, dtype=torch.bool), "name": "a"}
    for stage in (1, 3):
        model = Nested()
        model.true = name.endswith("true")
        model.expected = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(name, torch.float32)
        run = own_data(rank, world_size, tmp_path, zero(stage), **precision(name))
        run.fit(model, DataLoader([{"samples": samples, "more": more}] * 2, batch_size=None))
        assert run.global_step == 2 and not torch.equal(model.head.weight, Net().head.weight)


@distributed(world_size=2)
def test_every_precision_of_lightning_trains_or_is_refused_by_the_trainer(rank, world_size, tmp_path):
    names = [*get_args(_PRECISION_INPUT_STR), *get_args(_PRECISION_INPUT_INT), "64", "32", "16", "bf16"]
    assert len(names) >= 12
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 16-mixed is bf16-mixed on CPUs, Lightning says
            if str(name).startswith("transformer-engine"):
                with pytest.raises((ValueError, ModuleNotFoundError, ImportError)):
                    trainer(rank, world_size, tmp_path, zero(3), precision=name)
            else:
                model = fitted(rank, world_size, tmp_path, zero(3), precision=name)
                # fp16 skips the first steps, not all four
                assert is_plain(model) and not torch.equal(model.head.weight.float(), Net().head.weight), name


class MastersAndMoments(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        engine, optimizer = trainer.strategy.engine, trainer.strategy.engine.sharded(trainer.optimizers[0])
        masters = {flat.shard.dtype for unit in engine.units for flat in unit.flats}
        self.dtypes = masters | {optimizer.own_state(p)["exp_avg"].dtype for p in pl_module.parameters()}


@distributed(world_size=2)
def test_a_module_in_bf16_has_masters_and_moments_in_fp32(rank, world_size, tmp_path):
    for stage in STAGES:
        look = MastersAndMoments()
        with pytest.warns(UserWarning, match="16-bit already") if rank == 0 else nullcontext():
            fitted(rank, world_size, tmp_path, zero(stage), Net().bfloat16(), precision="bf16-mixed", callbacks=[look])
        assert look.dtypes == {torch.float32}, f"stage {stage}"


class Convolutions(Net):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.convolution = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x):
        return super().forward(x + self.convolution(x.unsqueeze(1)).float().mean(1))


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed"])
def test_running_statistics_stay_fp32_under_mixed_precision(rank, world_size, name, tmp_path):
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), Convolutions(), **precision(name)).state_dict()
    assert want["convolution.1.running_mean"].dtype == torch.float32
    for stage in (1, 3):
        got = fitted(rank, world_size, tmp_path, zero(stage), Convolutions(), **precision(name)).state_dict()
        assert_equal(got, want, f"stage {stage}")


# Runs


class Probed(Net):
    """A layer that only validation uses, one that nobody uses, and calls of a module by another door than forward."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.probes = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.seen = []

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            assert block.weight.shape == (DIM, DIM) and block.weight.ndim == 2
        return super().training_step(batch, batch_idx) + self.blocks[1].forward(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.probes[0](self(batch[0])).sum().item())


class AtTheEnd(Callback):
    """Uses the module after the last step, and after the fit."""

    def on_train_end(self, trainer, pl_module):
        self.outputs = [pl_module(torch.ones(1, DIM)).detach()]

    def on_fit_end(self, trainer, pl_module):
        self.outputs.append(pl_module(torch.ones(1, DIM)).detach())


@distributed(world_size=2)
def test_fit_validate_fit_with_layers_that_only_validation_uses(rank, world_size, tmp_path):
    def run(strategy):
        model, end = Probed(), AtTheEnd()
        runner = trainer(rank, world_size, tmp_path, strategy, callbacks=[end])
        runner.fit(model, loader(), loader(8))
        runner.validate(model, loader(8), verbose=False)
        runner.fit_loop.max_epochs = 2
        runner.fit(model, loader(), loader(8))
        return model, end.outputs

    want, outputs = run(DDPStrategy(find_unused_parameters=True))
    for stage in STAGES:
        model, got = run(zero(stage))
        assert_equal(model.state_dict(), want.state_dict(), f"stage {stage}")
        assert model.seen == want.seen and len(set(want.seen)) > 4
        assert all(torch.equal(*both) for both in zip(got, outputs, strict=True)) and len(got) == 2


@distributed(world_size=2)
def test_files_written_after_each_step_are_ddps_and_change_nothing(rank, world_size, tmp_path):
    def run(strategy, folder):
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
        fitted(rank, world_size, tmp_path, strategy, callbacks=[keep], enable_checkpointing=True)
        dist.barrier()
        return [torch.load(path)["state_dict"] for path in sorted(folder.iterdir())]

    want = run(DDPStrategy(), tmp_path / "ddp")
    assert len(want) == 4 and not torch.equal(want[0]["head.weight"], want[1]["head.weight"])
    for stage in STAGES:
        for got, state in zip(run(zero(stage), tmp_path / str(stage)), want, strict=True):
            assert_equal(got, state, f"stage {stage}")


@distributed(world_size=2)
def test_lightnings_own_boring_model_trains_by_the_strategys_name(rank, world_size, tmp_path):
    def run(strategy):
        torch.manual_seed(0)
        model, data = BoringModel(), DataLoader(RandomDataset(32, 16), batch_size=2)
        trainer(rank, world_size, tmp_path, strategy).fit(model, data, data)
        return model.state_dict()

    want = run("ddp")
    for stage in STAGES:
        assert_equal(run(f"zero{stage}"), want, f"stage {stage}")


COMPILED = {
    "submodule": lambda model: model.blocks.__setitem__(1, torch.compile(model.blocks[1], backend="eager")),
    "in place": lambda model: model.blocks[1].compile(backend="eager"),
    "whole": lambda model: model.compile(backend="eager"),
}


@distributed(world_size=2, timeout=120)
@pytest.mark.parametrize(
    "how", ["whole", *(pytest.param(how, marks=pytest.mark.full) for how in ("submodule", "in place"))]
)
def test_compiled_modules(rank, world_size, how, full, tmp_path):
    def run(stage, compiled):
        model = Net()
        if compiled:
            COMPILED[how](model)
        return [p.detach() for p in fitted(rank, world_size, tmp_path, zero(stage), model, max_steps=3).parameters()]

    for stage in (1, 3) if full else (3,):
        torch._dynamo.utils.counters.clear()
        for got, want in zip(run(stage, True), run(stage, False), strict=True):
            torch.testing.assert_close(got, want)  # a compiler may fuse
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


# Callbacks


class WithBackbone(Net):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.backbone = self.blocks

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


@distributed(world_size=2)
def test_backbone_finetuning_unfreezes_and_resumes_to_the_bit(rank, world_size, full, tmp_path):
    def run(strategy, epochs, seed=0, **kwargs):
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)
        model = WithBackbone(seed)
        runner = trainer(rank, world_size, tmp_path, strategy, callbacks=[callback], max_epochs=epochs)
        runner.fit(model, loader(8), **kwargs)
        return model.state_dict(), runner

    early, late = tmp_path / "early.ckpt", tmp_path / "late.ckpt"
    run(zero(0), 1)[1].save_checkpoint(early)
    run(zero(0), 2)[1].save_checkpoint(late)
    # ddp never reduces gradients of what was frozen at first, so only stages can be compared with one another
    unbroken, _ = run(zero(0), 3)
    assert not torch.equal(unbroken["blocks.0.weight"], Net().blocks[0].weight)
    # the callback freezes the backbone again when it resumes after it has unfrozen it
    frozen, _ = run(DDPStrategy(), 3, seed=1, ckpt_path=late)
    for stage in STAGES if full else (1, 3):
        state, runner = run(zero(stage), 3)
        assert_equal(state, unbroken, f"stage {stage}")
        assert [len(group["params"]) for group in runner.optimizers[0].param_groups] == [5, 6]
        for path, want in ((early, unbroken), (late, frozen)):
            assert_equal(run(zero(stage), 3, seed=1, ckpt_path=path)[0], want, f"stage {stage}, {path.stem}")


AVERAGES = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
}


@distributed(world_size=2)
@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_weights_are_validated_and_kept_as_under_ddp(rank, world_size, kind, tmp_path):
    def run(strategy):
        model = Probed()
        trainer(rank, world_size, tmp_path, strategy, callbacks=[AVERAGES[kind]()], max_epochs=3).fit(
            model, loader(), loader(8)
        )
        return model

    want = run(DDPStrategy(find_unused_parameters=True))
    for stage in (1, 3):
        model = run(zero(stage))
        assert_equal(model.state_dict(), want.state_dict(), f"stage {stage}")
        assert model.seen == want.seen


class Tunable(Net):
    lr = 0.01

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@distributed(world_size=2)
def test_the_learning_rate_is_found_as_under_ddp_and_then_trained_with(rank, world_size, tmp_path):
    def run(strategy):
        model, runner = Tunable(), trainer(rank, world_size, tmp_path, strategy)
        found = Tuner(runner).lr_find(model, loader(64), num_training=16, early_stop_threshold=None)
        runner.fit(model, loader())
        return found.results, model.lr, model.state_dict()

    *want, state = run(DDPStrategy())
    assert want[1] != Tunable.lr
    for stage in (1, 3):
        *got, weights = run(zero(stage))
        assert got == want, f"stage {stage}"
        assert_equal(weights, state, f"stage {stage}")
