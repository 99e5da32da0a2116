"""Checkpoint folders: saved at some number of ranks, stage and precision, and resumed at others."""

import functools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from lightning.pytorch import Callback, LightningModule
from test_checkpoint import Counted, assert_same
from test_strategy import DIM, trainer, zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.engine.names import clean_name
from lightning_zero.precision import raw_optimizer

SAMPLES, BATCH = 36, 12
"""In an epoch, and in a step on all ranks together: steps have the same samples at 1, 2, 3 and 4 ranks."""


class Layers(nn.Module):
    """Shapes that a shard's bounds cut in the middle of rows and planes, in all orders of memory."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(DIM, 75)
        self.back = nn.Parameter(torch.randn(75, DIM).t() / 9)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.cube = nn.Parameter(torch.randn(7, 9, 5).permute(2, 0, 1) / 9)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, DIM))
        self.ghost = nn.Parameter(torch.empty(3, 0))

    def forward(self, x):
        image = self.conv(x.unflatten(-1, (1, 2, 4)).repeat(1, 3, 2, 1)).mean((1, 2, 3))
        more = torch.cat([x, x @ self.nothing.t()], -1)
        x = more + torch.tanh(self.wide(x)) @ self.back.t()
        return x + self.gain * (image[:, None] + (x[:, :5] @ self.cube.flatten(1)).mean(-1, keepdim=True))


class Awkward(LightningModule):
    """Everything that may be in a module: tied, frozen, unused, buffers, extra state, groups, a scheduler."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.signs = nn.Embedding(2, DIM)
        self.blocks = nn.ModuleList(Layers() for _ in range(3))
        self.blocks[2].wide.weight = self.blocks[0].wide.weight
        self.blocks[1].wide.requires_grad_(False)
        self.blocks[1].cube.requires_grad_(False)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 1)
        self.unused = nn.Parameter(torch.randn(70))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("level", torch.randn(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.extra = Counted()

    def forward(self, x):
        x = x + self.signs((x > 0).long()).mean(-2)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.extra.count += 1
        return F.mse_loss(self(batch[0]).float(), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", F.mse_loss(self(batch[0]).float(), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        """Groups of interleaved parameters, one of them empty; the schedule is in its warm-up at the first save."""
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": []}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(world_size):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, DIM, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH // world_size)


def everything(trainer):
    """What a checkpoint must bring back, whole: masters, other entries of the state, optimizers and what moves them.
    Collective.
    """
    engine, module = trainer.strategy.engine, trainer.lightning_module
    masters = {}
    for unit in engine.units:
        for flat in unit.flats:
            for index, name in enumerate(flat.names):
                masters[clean_name(name)] = flat.layout.slots[index].view(flat.whole_master(index)).clone()
    own = {clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    others = {clean_name(k): v for k, v in trainer.strategy.lightning_module_state_dict().items()}
    others = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in others.items() if k not in own}
    return {
        "masters": dict(sorted(masters.items())),
        "others": others,
        "optimizers": [engine.optimizer_state(raw_optimizer(o), dst=0) for o in trainer.strategy.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scale": trainer.precision_plugin.state_dict(),
        "step": trainer.global_step,
    }


class Watch(Callback):
    """The state at the start and at the end of a run, and a save after its first epoch."""

    def __init__(self, path=None):
        self.path = path

    def on_train_start(self, trainer, pl_module):
        self.start = everything(trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        if self.path is not None and trainer.current_epoch == 0:
            self.saved = everything(trainer)
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer, pl_module):
        self.end = everything(trainer)


def run(rank, world_size, folder, model, stage, precision="32-true", path=None, ckpt_path=None, settings=None, **more):
    """Train two epochs, saving after the first to ``path``, or going on from ``ckpt_path``; what :class:`Watch` saw."""
    watch = Watch(path)
    strategy = zero(stage, **{"state_dict_type": "sharded", **(settings or {})})
    more = {"max_epochs": 2, **more, "callbacks": [watch, *more.get("callbacks", ())]}
    trainer(rank, world_size, folder, strategy, precision=precision, **more).fit(
        model(), data(world_size), ckpt_path=ckpt_path
    )
    return {name: vars(watch)[name] for name in ("start", "saved", "end") if name in vars(watch)}


# From anywhere to anywhere

RANKS, STAGES, PRECISIONS = (1, 2, 3, 4), (0, 1, 2, 3), ("32-true", "bf16-mixed")
PLACES = list(product(RANKS, STAGES, PRECISIONS))

SAMPLE = [
    # the same place
    ((2, 3, "32-true"), (2, 3, "32-true")),
    ((3, 3, "bf16-mixed"), (3, 3, "bf16-mixed")),
    # another stage
    ((2, 1, "32-true"), (2, 3, "32-true")),
    ((2, 3, "bf16-mixed"), (2, 0, "bf16-mixed")),
    ((3, 2, "bf16-mixed"), (3, 1, "bf16-mixed")),
    ((1, 0, "32-true"), (1, 3, "32-true")),
    # other ranks
    ((2, 3, "32-true"), (3, 3, "32-true")),
    ((3, 3, "bf16-mixed"), (2, 3, "bf16-mixed")),
    ((3, 2, "32-true"), (1, 2, "32-true")),
    ((1, 3, "bf16-mixed"), (4, 3, "bf16-mixed")),
    ((4, 1, "32-true"), (3, 0, "32-true")),
    ((4, 3, "32-true"), (2, 1, "32-true")),
    # another precision, too
    ((2, 3, "32-true"), (2, 3, "bf16-mixed")),
    ((3, 0, "bf16-mixed"), (4, 2, "32-true")),
    ((4, 2, "bf16-mixed"), (1, 3, "32-true")),
]


def one(rank, world_size, *args, **kwargs):
    return run(rank, world_size, *args, **kwargs) if rank == 0 else run(rank, world_size, *args, **kwargs) and None


def many(rank, world_size, folder, stage, precision, paths):
    """Resume from one checkpoint after the other."""
    return [
        one(rank, world_size, folder, functools.partial(Awkward, seed=1), stage, precision, ckpt_path=path)
        for path in paths
    ]


class Runs:
    """Runs that are compared with, each done once."""

    def __init__(self, folder):
        self.folder = folder
        self._unbroken, self._continued = {}, {}

    def path(self, place, kind="sharded"):
        return self.folder / "-".join(map(str, (*place, kind)))

    def unbroken(self, place, kind="sharded"):
        """Two epochs with a save between them."""
        if (place, kind) not in self._unbroken:
            ranks, stage, precision = place
            settings = {"state_dict_type": kind}
            path = self.path(place, kind)
            args = self.folder, Awkward, stage, precision
            self._unbroken[place, kind] = run_ranks(one, ranks, *args, path=path, settings=settings)[0]
        return self._unbroken[place, kind]

    def single_file(self, ranks, precision):
        """The same with stage 1 and Lightning's ordinary file: no stage changes a bit where a step has one batch."""
        return self.unbroken((ranks, 1, precision), "full")

    def continued(self, source, target):
        """The second epoch from such a file, at other ranks or in another precision."""
        ends = source[::2], target[::2]
        if ends not in self._continued:
            self.single_file(*ends[0])
            path = self.path((source[0], 1, source[2]), "full")
            [result] = run_ranks(many, target[0], self.folder, 1, target[2], [path])[0]
            self._continued[ends] = result
        return self._continued[ends]

    def check(self, source, target, got):
        """A run that was saved at one place and resumed at another."""
        saved, file = self.unbroken(source), self.single_file(source[0], source[2])
        assert_same(saved["saved"], file["saved"])
        assert_same(saved["end"], file["end"])  # saving has changed nothing
        assert_same(got["start"], saved["saved"])
        assert_same(got["end"], self.continued(source, target)["end"])
        if source[::2] == target[::2]:
            assert_same(got["end"], saved["end"])
        elif source[2] == target[2]:
            assert_near(got["end"], saved["end"], target[2])


def assert_near(got, want, precision):
    """Equal but for the order of a sum: the mean over the samples of a step is taken within each rank first.

    In 32-true that rounds a gradient to 2**-24 of its terms. In bf16-mixed each rank's gradient is rounded to bf16, to
    2**-9 of itself, before the ranks' are added. Adam moves a weight by about the learning rate however small its
    gradient is, so that where terms cancel a rounding can become a part of that.
    """
    steps, rate = SAMPLES // BATCH, 0.01
    most = steps * rate * (0.02 if precision == "32-true" else 1)
    for name, value in want["masters"].items():
        assert torch.allclose(got["masters"][name], value, rtol=0, atol=most), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


def name_of(place):
    return "-".join(map(str, place))


@pytest.mark.parametrize(("source", "target"), SAMPLE, ids=name_of)
def test_resumed_at_another_place(source, target, runs):
    runs.unbroken(source)
    ranks, stage, precision = target
    [got] = run_ranks(many, ranks, runs.folder, stage, precision, [runs.path(source)])[0]
    runs.check(source, target, got)


@pytest.mark.full
@pytest.mark.parametrize("target", PLACES, ids=name_of)
def test_resumed_from_every_place(target, runs):
    """All 32, which makes 1024 pairs."""
    for source in PLACES:
        runs.unbroken(source)
    ranks, stage, precision = target
    paths = [runs.path(source) for source in PLACES]
    results = run_ranks(many, ranks, runs.folder, stage, precision, paths, timeout=300)[0]
    for source, got in zip(PLACES, results, strict=True):
        runs.check(source, target, got)
