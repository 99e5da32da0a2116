"""The planner: what a dry run counts is what the engine takes."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness import distributed, run_ranks
from lightning.pytorch import LightningModule
from oracles import communicator
from test_strategy import fitted

from lightning_zero.__main__ import main
from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Engine
from lightning_zero.plan import tables, users
from lightning_zero.plan.account import Account
from lightning_zero.plan.dry_run import Case, Workload, dry_run
from lightning_zero.plan.fit_plan import FitPlan
from lightning_zero.plan.generic import Size, account_of
from lightning_zero.plan.ledger import ACCELERATOR, Ledger
from lightning_zero.plan.model import Transformer
from lightning_zero.plan.pretend import PlannedCommunicator, as_on_a_gpu, ranks
from lightning_zero.plan.sizes import nbytes, shown
from lightning_zero.plan.variants import Machine, Variant, advice, recommended

CPU = torch.device("cpu")
SMALL = {"unit_classes": ("Block",), "min_unit_bytes": 0}
CUT = {**SMALL, "max_unit_bytes": 100_000}
APART = (("min_unit_bytes", 0),)
SIZE = Size(1.6e6, 10, 128, 256, seq=32)


def transformer(device, layers=3):
    module = Transformer(layers, 64, 256, 128, checkpointed=True)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)
    return Workload(module, partial(torch.optim.AdamW, list(module.parameters())), partial(module, tokens))


def steps(comm, device, **settings):
    """Events, states and elements sent of two steps."""
    with torch.device(device):
        module, make_optimizer, loss = transformer(device)
    optimizer = make_optimizer()
    engine = Engine(module, ZeroConfig(**settings), comm, compute_dtype=lambda param: torch.bfloat16)
    found = []
    for _ in range(2):
        engine.events = []
        with engine.forward():
            value = loss()
        with engine.backward():
            value.backward()
        del value
        events = [event for event in engine.events if "wait" not in event[0]]  # whether one waits is up to the clock
        found += [events, engine.memory(), dict(comm.traffic)]
        engine.step(optimizer)
        optimizer.zero_grad()
    found.append(engine.memory())
    return found


def real_steps(rank, world_size, settings):
    with communicator() as comm:
        return steps(comm, CPU, **settings)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("settings", [SMALL, CUT], ids=["blocks", "cut"])
def test_dry_run_does_and_holds_what_a_run_does(stage, settings):
    """Events, bytes by kind, free memory of the pool among them, and elements sent, on rank 0."""
    settings = {"stage": stage, **settings}
    with warnings.catch_warnings(), ranks(2), Ledger().counting(), as_on_a_gpu():
        warnings.simplefilter("ignore")
        planned = steps(PlannedCommunicator(CPU), CPU, **settings)
    assert planned == run_ranks(real_steps, 2, settings)[0]


@pytest.mark.parametrize("world_size", [4, 1024])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_those_of_the_papers_formulas(stage, world_size):
    size = Size(1e9, 3, 4096, seq=16)
    account = account_of(size, tables._states(stage, world_size), only_states=True)
    whole, shared = tables.FORMULAS[stage]
    assert account.steady == pytest.approx((whole + shared / world_size) * account.parameters, rel=0.01)
    assert account.parameters == pytest.approx(1e9, rel=0.001)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4, micro_batches=2),
        pytest.param(Case(2, 64), marks=pytest.mark.full),
        Case(3, 4),
        pytest.param(Case(3, 16, "32-true"), marks=pytest.mark.full),
        pytest.param(Case(3, 4, optimizer="cpu"), marks=pytest.mark.full),
        Case(3, 4, optimizer="nvme", params="cpu"),
    ],
    ids=str,
)
def test_two_runs_of_few_blocks_stand_for_a_run_of_many(case, monkeypatch):
    case = replace(case, settings=APART)
    few = account_of(SIZE, case)
    monkeypatch.setattr("lightning_zero.plan.generic.FEW", 100)
    many = account_of(SIZE, case)
    for name in ("parameters", "steady", "device", "host", "disk", "traffic"):
        assert getattr(few, name) == pytest.approx(getattr(many, name), rel=0.001, abs=4096), name


def test_offloaded_states_are_counted_where_they_rest():
    def parts(optimizer, params):
        account = account_of(replace(SIZE, layers=5), Case(3, 4, optimizer=optimizer, params=params, settings=APART))
        return [round(4 * nbytes / account.parameters, 1) for nbytes in (account.steady, account.host, account.disk)]

    on_device, host, disk = parts("none", "none")
    assert (on_device, disk) == (16, 0) and host < 0.1
    on_device, host, disk = parts("nvme", "none")
    assert (on_device, disk) == (2, 16)  # 16-bit shards stay
    on_device, host, disk = parts("nvme", "nvme")
    assert (on_device, disk) == (0, 18)
    on_device, host, disk = parts("cpu", "cpu")
    assert (on_device, disk) == (0, 0) and host > 18


def test_peak_does_not_depend_on_earlier_runs():
    size, case = replace(SIZE, layers=5), Case(3, 4, settings=APART)
    assert account_of(size, case) == account_of(size, case)


def test_traffic_is_counted_over_one_step():
    small = replace(SIZE, layers=5)
    sent = {stage: account_of(small, Case(stage, 2, settings=APART)).traffic * 2 for stage in range(4)}
    assert [round(sent[stage], 2) for stage in range(3)] == [2, 2, 2]
    assert 2.5 < sent[3] <= 3


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).square().mean() + 0 * batch[1].sum()
        return {"loss": loss * (1 if loss.item() > 0 else 2)}

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)], []


class TwoOptimizers(Lit):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_command_plans_a_users_module(capsys):
    main(f"plan --module {__name__}:Lit --world-size 2 --batch 8x64:fp32,8 --device-memory 1GB --nvme 1TB".split())
    out = capsys.readouterr().out
    assert "16,640 parameters" in out and "Take ddp (stage 0)" in out
    assert out.count("| zero3") == 6 and "| zero1, optimizer to nvme |" in out
    steady = next(line for line in out.splitlines() if line.startswith("| zero3 |")).split("|")[2].strip()
    assert steady == "99.8 KB"  # 12 bytes a parameter: SGD has one moment


def test_command_plans_by_size_and_says_what_it_assumes(capsys):
    main("plan --params 1e7 --layers 4 --hidden 256 --vocab 512 --batch 1x64 --device-memory 30MB".split())
    out = capsys.readouterr().out
    assert "blocks checkpointed" in out and "AdamW" in out
    assert "no: device" in out and "Take zero" in out


@pytest.mark.parametrize(
    "options, words",
    [
        ("--module nowhere:Lit", "cannot be imported"),
        (f"--module {__name__}:Missing", "has no 'Missing'"),
        (f"--module {__name__}", "package.module:Class"),
        (f"--module {__name__}:CPU", "neither a class nor a function"),
        (f"--module {__name__}:TwoOptimizers --batch 8x64:fp32,8", "returns 2"),
        (f"--module {__name__}:Lit --batch 8y64", "is no tensor of a batch"),
        ("--params 1e6 --layers 4 --hidden 256", "too few"),
        ("--params 1e6", "--layers and --hidden"),
        ("--params 1e9 --layers 4 --hidden 256 --device-memory 80", "'80' is no size"),
        ("--params 1e9 --layers 4 --hidden 256 --world-size 0", "--world-size 0"),
    ],
)
def test_wrong_options_are_told(options, words):
    with pytest.raises(SystemExit, match=words):
        main(["plan", *options.split()])


def variant(stage, device, host=0, optimizer="none"):
    return Variant(stage, optimizer, "none", Account(1.0, {}, device, host, 0.0, {"gather": 1.0, "reduce": 1.0}))


def test_recommendation_is_the_cheapest_that_leaves_room():
    machine = Machine(device=100, host=100, disk=0, ranks=2)
    choices = [variant(1, 120), variant(2, 95), variant(3, 50), variant(3, 10, 40, "cpu")]
    best = recommended(choices, machine)
    assert best is choices[2] and "zero2 needs device 95.0 B of 90.0 B" in advice(choices, machine)
    assert [choice.verdict(machine)[:5] for choice in choices] == ["no: d", "tight", "yes", "yes"]
    assert recommended(choices[:2], machine) is choices[1] and "tight" in advice(choices[:2], machine)
    assert recommended([variant(3, 10, 60, "cpu")], machine) is None  # two ranks of a host need 120
    assert "Nothing fits" in advice([variant(3, 10, 60, "cpu")], machine)


@pytest.mark.parametrize("text, size", [("80GB", 80e9), ("80 GiB", 80 * 2**30), ("1.5TB", 1.5e12), ("0B", 0)])
def test_sizes_are_read(text, size):
    assert nbytes(text) == size


@pytest.mark.parametrize("size, text", [(0, "0 B"), (950, "950 B"), (42.9e9, "42.9 GB"), (1.5e12, "1.50 TB")])
def test_sizes_are_shown(size, text):
    assert shown(size) == text


def test_batches_are_read():
    assert users.batch("8x3:fp32,8", "bf16-true") == [((8, 3), torch.bfloat16), ((8,), torch.int64)]


def test_dry_run_leaves_nothing_behind():
    resize = torch.UntypedStorage.resize_
    attention = torch.nn.functional.scaled_dot_product_attention
    dry_run(partial(transformer, ACCELERATOR), Case(3, 2))
    assert torch.UntypedStorage.resize_ is resize
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert not torch.distributed.is_initialized() and not isinstance(torch.empty(1), torch._subclasses.FakeTensor)


@distributed(world_size=2)
def test_units_of_a_cut_block_do_not_outlive_its_recompute(rank, world_size):
    """Of eight blocks, cut at their layers and checkpointed, two are whole at a time at most."""
    with communicator() as comm:
        module, make_optimizer, loss = transformer(CPU, layers=8)
        engine = Engine(module, ZeroConfig(stage=3, **CUT), comm, compute_dtype=lambda param: torch.bfloat16)
        buffers = [flat.buffer for unit in engine.units if not unit.is_root for flat in unit.flats]
        highest = 0

        class Watching(list):
            def append(self, event):
                nonlocal highest
                highest = max(highest, sum(buffer.nbytes for buffer in buffers if buffer.allocated))

        engine.events = Watching()
        with engine.forward():
            value = loss()
        with engine.backward():
            value.backward()
        assert highest <= 2.25 / 8 * sum(buffer.nbytes for buffer in buffers)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plan_of_a_fit_has_the_states_that_the_run_then_holds(rank, world_size, stage):
    with communicator() as comm:
        module, make_optimizer, loss = transformer(CPU)
        optimizer = make_optimizer()
        settings = ZeroConfig(stage=stage, **SMALL)
        engine = Engine(module, settings, comm, compute_dtype=lambda param: torch.bfloat16)
        plan = FitPlan(engine, [optimizer], sums=False)
        for _ in range(2):
            with engine.forward():
                value = loss()
            with engine.backward():
                value.backward()
            held = engine.memory()
            engine.step(optimizer)
            optimizer.zero_grad()
        assert plan.steady["parameters"] == held["parameters"]
        assert plan.steady["master weights"] == held["master"]
        assert plan.steady["gradients"] == held["gradients"]
        assert plan.steady["optimizer"] == pytest.approx(held["optimizer"], rel=0.01)  # and the steps' numbers
        assert "states" in plan.announcement() and "planned" in plan.comparison()


@distributed(world_size=2)
@pytest.mark.parametrize("summary", [True, False])
def test_fit_tells_its_plan_with_the_model_summary(rank, world_size, tmp_path, summary):
    told = []
    with patch("lightning_zero.plan.fit_plan.rank_zero_info", told.append):
        fitted(rank, world_size, tmp_path, "zero3", enable_model_summary=summary)
    words = [" ".join(text.split()[:3]) for text in told]
    assert words == (["Plan for rank", "Rank 0 planned"] if summary and rank == 0 else [])


def test_tables_of_the_readme_are_what_the_code_prints(full):
    """A row or a column of each; with ``--full`` the whole."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    if full:
        words = " ".join(readme.split())
        assert all(" ".join(table().split()) in words for table in tables.TABLES.values())
    assert tables.paper(("7.5B",), (64,)).splitlines()[2].split("|")[2].strip() in readme
    assert tables.fits((("7B", 4, "A100-40", ((3, "none", "none"),)),)).splitlines()[2] in readme
    assert tables.traffic(64, (3,), (1,)).splitlines()[2].removesuffix("|").strip() in readme
