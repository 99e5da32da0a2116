"""Checkpoint folders: saved at some number of ranks, stage and precision, and resumed at others."""

import copy
import functools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import run_ranks
from lightning.pytorch import Callback, LightningModule
from test_checkpoint import Counted, assert_same
from test_precision import precision
from test_strategy import DIM, trainer, zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.engine import expected
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
        self.build()

    def build(self):
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
        self.register_buffer("turned", torch.randn(3, 5).t())
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("slice", torch.randn(9, 4)[::2, 1:3])
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
        "optimizers": [
            copy.deepcopy(engine.optimizer_state(raw_optimizer(o), dst=0)) for o in trainer.strategy.optimizers
        ],
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


def run(rank, world_size, folder, model, stage, name="32-true", path=None, ckpt_path=None, settings=None, **more):
    """Train two epochs, saving after the first to ``path``, or going on from ``ckpt_path``; what :class:`Watch` saw."""
    watch = Watch(path)
    strategy = zero(stage, **{"state_dict_type": "sharded", **(settings or {})})
    more = {"max_epochs": 2, **({} if "plugins" in more else precision(name)), **more}
    more["callbacks"] = [watch, *more.get("callbacks", ())]
    trainer(rank, world_size, folder, strategy, **more).fit(model(), data(world_size), ckpt_path=ckpt_path)
    return {name: vars(watch)[name] for name in ("start", "saved", "end") if name in vars(watch)}


# From anywhere to anywhere

RANKS, STAGES, PRECISIONS = (1, 2, 3, 4), (0, 1, 2, 3), ("32-true", "bf16-mixed")
PLACES = list(product(RANKS, STAGES, PRECISIONS))

SAMPLE = [  # all of them with --full
    # the same place
    ((2, 3, "32-true"), (2, 3, "32-true")),
    # another stage
    ((2, 3, "bf16-mixed"), (2, 0, "bf16-mixed")),
    ((3, 2, "bf16-mixed"), (3, 1, "bf16-mixed")),
    ((1, 0, "32-true"), (1, 3, "32-true")),
    # other ranks
    ((2, 3, "32-true"), (3, 3, "32-true")),
    ((3, 2, "32-true"), (1, 2, "32-true")),
    ((1, 3, "bf16-mixed"), (4, 3, "bf16-mixed")),
    ((4, 1, "32-true"), (3, 0, "32-true")),
    # another precision, too
    ((2, 3, "32-true"), (2, 3, "bf16-mixed")),
    ((4, 2, "bf16-mixed"), (1, 3, "32-true")),
]


def one(rank, world_size, *args, **kwargs):
    """A run, of which rank 0 says what was there."""
    seen = run(rank, world_size, *args, **kwargs)
    return seen if rank == 0 else None


def many(rank, world_size, folder, stage, precision, paths):
    """Resume from one checkpoint after the other."""
    model = functools.partial(Awkward, seed=1)
    return [one(rank, world_size, folder, model, stage, precision, ckpt_path=path) for path in paths]


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
    way = SAMPLES // BATCH * 0.01  # what Adam has moved a weight by at most: steps times learning rate
    most = way * (2**-14 if precision == "32-true" else 2**-5)
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


# Awkward modules, and settings of the run

HERE, THERE = (2, 3), (3, 1)
"""Ranks and stage."""


def roundtrip(folder, model, source=HERE, target=THERE, same=True, resumed=None, **settings):
    """Save at one place, resume at another: with all that was there, and then as from Lightning's ordinary file.

    Args:
        model: makes the module; of the resumed run, too, unless ``resumed`` does.
        source, target: ranks and stage.
        same: whether at the same number of ranks the resumed run is to be the unbroken one.
        settings: of the runs; a function makes them (objects that hold state).

    Returns:
        What the unbroken and the resumed run had seen.
    """
    made = settings.pop("make", dict)
    more = {"folder": folder, **settings}

    def save(rank, world_size):
        stage = source[1]
        seen = one(rank, world_size, model=model, stage=stage, path=folder / "folder", **merged(more, made()))
        if source[0] != target[0]:
            full = merged(more, made(), {"settings": {"state_dict_type": "full", "async_save": False}})
            one(rank, world_size, model=model, stage=stage, path=folder / "file", **full)
        return seen

    def resume(rank, world_size):
        paths = ["folder"] if source[0] == target[0] else ["folder", "file"]
        again = resumed or model
        return [
            one(rank, world_size, model=again, stage=target[1], ckpt_path=folder / path, **merged(more, made()))
            for path in paths
        ]

    before = run_ranks(save, source[0])[0]
    after = run_ranks(resume, target[0])[0]
    assert_same(after[0]["start"], before["saved"])
    if source[0] != target[0]:
        assert_same(after[0]["end"], after[1]["end"])
    elif same:
        assert_same(after[0]["end"], before["end"])
    return before, after[0]


def merged(*parts):
    """Arguments of a run; those of the strategy are put together."""
    whole = {key: value for part in parts for key, value in part.items()}
    settings = {key: value for part in parts for key, value in part.get("settings", {}).items()}
    return {**whole, "settings": settings}


class Of(LightningModule):
    """A model of the zoo, with the steps' own data."""

    def __init__(self, name, **options):
        super().__init__()
        self.net = zoo.make(name)
        self.options = options

    def training_step(self, batch, batch_idx):
        return self.net.loss(self.net.batch(self.global_rank, self.global_step))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, **self.options)


SOME_MODELS = {"Complex", "HalfBlock", "MixedPrecisions"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SOME_MODELS else pytest.mark.full) for name in zoo.ZOO]
)
def test_models_of_the_zoo(name, tmp_path):
    # the file has the rounded weights of a 16-bit block, and goes on otherwise
    target = (2, 1) if name == "HalfBlock" else THERE
    roundtrip(tmp_path, functools.partial(Of, name), HERE, target, settings=zoo.ZOO[name].config)


WAYS = [((2, 3), (2, 1)), ((2, 1), (2, 3)), ((3, 3), (1, 0)), ((1, 2), (3, 3))]


@pytest.mark.parametrize("name", ["bf16-true", "16-true", pytest.param("16-mixed", marks=pytest.mark.full)])
@pytest.mark.parametrize(("source", "target"), [WAYS[0], *(pytest.param(*w, marks=pytest.mark.full) for w in WAYS[1:])])
def test_masters_and_loss_scale_come_back(name, source, target, tmp_path):
    """A run in 16 bits goes on with what the forward has rounded away."""
    scaling = {"growth_interval": 4, "init_scale": 256.0}
    before, after = roundtrip(tmp_path, Awkward, source, target, make=lambda: precision(name, **scaling))
    assert ("scale" in before["saved"]["scale"]) == name.startswith("16")
    masters = [value for value in after["start"]["masters"].values() if value.numel()]
    half = torch.bfloat16 if name == "bf16-true" else torch.float16
    assert any((value != value.to(half)).any() for value in masters)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.full), "nvme"])
@pytest.mark.parametrize(("source", "target"), [((2, 3), (3, 3)), pytest.param((2, 1), (2, 3), marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.full)])
def test_offload(name, device, source, target, tmp_path):
    """Saved from tiers, resumed without, and the other way round: nobody can tell."""
    disk = {"device": device, **({"nvme_path": tmp_path} if device == "nvme" else {})}
    (tmp_path / "back").mkdir()

    def settings(stage):
        return {"offload_optimizer": disk, **({"offload_params": disk} if stage == 3 else {})}

    def save(rank, world_size, path, settings):
        return one(rank, world_size, tmp_path, Awkward, source[1], name, path=tmp_path / path, settings=settings)

    def resume(rank, world_size, path, settings):
        return one(rank, world_size, tmp_path, Awkward, target[1], name, ckpt_path=tmp_path / path, settings=settings)

    there = run_ranks(save, source[0], "tier", settings(source[1]))[0]
    here = run_ranks(save, source[0], "memory", {})[0]
    assert_same(there, here)
    results = [
        run_ranks(resume, target[0], path, more)[0]
        for path, more in [("tier", {}), ("tier", settings(target[1])), ("memory", settings(target[1]))]
    ]
    for result in results:
        assert_same(result["start"], here["saved"])
        assert_same(result["end"], results[0]["end"])


@pytest.mark.parametrize("source", [(2, 3), (2, 0)])
def test_saved_while_training_goes_on(source, tmp_path):
    """What is written is what was there at the save, and nothing that has changed since."""
    roundtrip(tmp_path, Awkward, source, (2, 1), settings={"async_save": True})


class Two(Awkward):
    """Two optimizers in manual optimization, one of them without state, and parameters that neither has."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        first = torch.optim.SGD(self.blocks.parameters(), lr=0.01)
        second = torch.optim.AdamW([*self.signs.parameters(), *self.head.parameters()], lr=0.01, amsgrad=True)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (first, second)]


def test_several_optimizers(tmp_path):
    roundtrip(tmp_path, Two)


class Normed(Awkward):
    """BatchNorm, whose buffers every rank changes with its own samples; under ddp rank 0's win."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(DIM)


def test_batch_norm(tmp_path):
    roundtrip(tmp_path, Normed, (2, 3), (2, 0))


class Late(Awkward):
    """Built on meta, with initialisers of its own."""

    def __init__(self):
        LightningModule.__init__(self)

    def configure_model(self):
        if not hasattr(self, "blocks"):
            with torch.device("meta"):
                self.build()

    def setup(self, stage):
        torch.manual_seed(0)  # what fills them comes later

    def _init_weights(self, module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_() if tensor.dtype == torch.int64 else nn.init.normal_(tensor, std=0.1)


@pytest.mark.parametrize(
    ("source", "target", "resumed"),
    [
        ((2, 3), (2, 3), Late),
        ((3, 3), (1, 0), Awkward),
        pytest.param((2, 3), (2, 3), Awkward, marks=pytest.mark.full),
        pytest.param((1, 1), (3, 3), Late, marks=pytest.mark.full),
    ],
)
def test_modules_on_meta(source, target, resumed, tmp_path):
    """Saved by one, resumed by another, and by a plain one."""
    roundtrip(tmp_path, Late, source, target, resumed=resumed)


class Optimizer(Awkward):
    """With another optimizer."""

    def __init__(self, make, seed=0):
        super().__init__(seed)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.01)


def sgd_with_momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, nesterov=True)


def numbers_in_tensors(module):
    """The learning rate is a tensor."""
    return torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False)


def adagrad(module):
    return torch.optim.Adagrad(module.parameters(), lr=0.01)


def with_a_stranger(module):
    """One of the parameters is no part of the module."""
    torch.manual_seed(3)
    stranger = nn.Parameter(torch.randn(5, 7))
    stranger.grad = torch.ones(5, 7)
    module.__dict__["stranger"] = stranger
    return torch.optim.AdamW([*module.parameters(), stranger], lr=0.01)


class Keep(Optimizer):
    """The stranger's gradient stays."""

    def optimizer_zero_grad(self, *args):
        super().optimizer_zero_grad(*args)
        if "stranger" in vars(self):
            self.stranger.grad = torch.ones(5, 7)


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        numbers_in_tensors,
        with_a_stranger,
        *(pytest.param(make, marks=pytest.mark.full) for make in (sgd_with_momentum, adagrad)),
    ],
)
def test_other_optimizers(make, tmp_path):
    roundtrip(tmp_path, functools.partial(Keep, make), same=False)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_reads_no_parameter_as_a_whole(stage, runs, monkeypatch):
    """Each rank reads its own part, when the module is sharded."""
    place = 2, 3, "32-true"
    runs.unbroken(place)
    read = []
    monkeypatch.setattr(expected, "read", lambda param: read.append(param) if expected.expected(param) else None)

    def resume(rank, world_size):
        one(rank, world_size, runs.folder, Awkward, stage, ckpt_path=runs.path(place))
        return len(read)

    assert run_ranks(resume, 2) == [0, 0]
