"""Schedulers by name: DeepSpeed's rates at every optimizer step, torch's classes, and what is refused.

The rates were observed of DeepSpeed 0.19.8's own classes, called as its engine does: before each step of the optimizer.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_zero.config import TrainingConfig
from lightning_zero.optim.schedules import CLASSES, REFUSED, check_scheduler, make_scheduler
from lightning_zero.precision.schedulers import hold

STEPS = 12
STAIRS = {"cycle_second_step_size": 6, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}
THIRD = 0.3666666666666667
RATES = {
    "range": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
        [0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875],
    ),
    "range_stairs": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
        [0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 2.0, 2.0, 2.0],
    ),
    "cycle": (
        "OneCycle",
        {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1},
        [0.1, 0.2, 0.30000000000000004, 0.4, 0.5, 0.4, 0.30000000000000004, 0.2, 0.1]
        + [0.08, 0.06666666666666667, 0.05714285714285715],
    ),
    "cycle_stairs": (
        "OneCycle",
        {**CYCLE, **STAIRS},
        [0.1, 0.1, 0.30000000000000004, 0.30000000000000004, 0.5, THIRD, THIRD]
        + [0.23333333333333334, 0.23333333333333334, 0.1, 0.1, 0.1],
    ),
    "warmup": ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.05, 0.07924812503605783] + [0.1] * 8),
    "warmup_of_one": ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, [0.0, 0.0, 0.05] + [0.1] * 9),
    "warmup_linear": (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.02, "warmup_max_lr": [0.1, 0.3]},
        [0.02, 0.02, 0.04, 0.06, 0.08] + [0.1] * 7,
    ),
    "decay": (
        "WarmupDecayLR",
        {"warmup_num_steps": 3, "total_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 0.2},
        [0.0, 0.0, 0.06666666666666667, 0.13333333333333333, 0.2, 0.17142857142857143, 0.14285714285714288]
        + [0.11428571428571428, 0.08571428571428572, 0.05714285714285714, 0.02857142857142857, 0.0],
    ),
    "cosine": (
        "WarmupCosineLR",
        {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01},
        [0.0, 0.010000000000000002, 0.06678367782143116, 0.1, 0.09336825748732973, 0.07525, 0.0505]
        + [0.025750000000000012, 0.007631742512670284, 0.001, 0.001, 0.001],
    ),
}
MOMENTA = {
    "cycle": [0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001, 0.8500000000000001, 0.875]
    + [0.9, 0.9450000000000001, 0.9900000000000001, 1.035],
    "cycle_stairs": [0.8, 0.9, 0.8500000000000001, 0.8500000000000001, 0.8, 0.8333333333333334, 0.8333333333333334]
    + [0.8666666666666667, 0.8666666666666667, 0.9, 0.9, 0.9],
}
TORCHS = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5]},
    "ConstantLR": {"total_iters": 4},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 8},
    "CyclicLR": {"base_lr": [0.01, 0.02], "max_lr": 0.1, "step_size_up": 3, "mode": "triangular2"},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "OneCycleLR": {"max_lr": [0.1, 0.2], "total_steps": 20, "anneal_strategy": "linear"},
    "PolynomialLR": {"total_iters": 9},
}


class Module(nn.Module):
    """Says nothing of a schedule."""


MODULE = Module()


def adamw():
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.2)]
    return torch.optim.AdamW(groups)


def made(kind, params, optimizer, total=None):
    return make_scheduler({"type": kind, "params": params}, optimizer, lambda: total, MODULE)


def rates(optimizer, scheduler, steps=STEPS):
    """The rate and the momentum of the first group that each step of the optimizer would use, and those after."""
    seen = []
    for _ in range(steps):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("case", RATES)
def test_rates_of_every_step_are_those_of_deepspeed(case):
    kind, params, want = RATES[case]
    check_scheduler({"type": kind, "params": params})
    optimizer = adamw()
    seen = rates(optimizer, made(kind, params, optimizer))
    assert [lr for lr, _ in seen] == want
    momenta = [(first, 0.99) for first in MOMENTA[case]] if case in MOMENTA else [(0.9, 0.999)] * STEPS
    assert [betas for _, betas in seen] == momenta


@pytest.mark.parametrize("case", [*RATES, *TORCHS])
def test_a_schedule_goes_on_where_it_was_saved(case):
    kind, params = RATES[case][:2] if case in RATES else (case, TORCHS[case])
    optimizer = adamw()
    want = rates(optimizer, made(kind, params, optimizer))
    first = adamw()
    scheduler = made(kind, params, first)
    begun = rates(first, scheduler, 5)
    saved = copy.deepcopy((first.state_dict(), scheduler.state_dict()))
    second = adamw()
    resumed = made(kind, params, second)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.get_last_lr() == [group["lr"] for group in second.param_groups]
    assert begun + rates(second, resumed, STEPS - 5) == want
    assert len({lr for lr, _ in want}) > 1


def test_after_a_restart_the_configuration_counts():
    """A run that is made longer decays to its new end."""
    optimizer = adamw()
    short = made("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 6}, optimizer)
    rates(optimizer, short, 5)
    longer = made("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 50}, optimizer)
    longer.load_state_dict(short.state_dict())
    optimizer.step()
    longer.step()
    assert optimizer.param_groups[0]["lr"] == 0.001 * ((50 - 5) / 48)


def test_every_group_has_its_own_rate():
    optimizer = adamw()
    scheduler = made("WarmupLR", {"warmup_num_steps": 2, "warmup_min_lr": [0.0, 0.1]}, optimizer)
    assert scheduler.get_last_lr() == [0.0, 0.1]
    rates(optimizer, scheduler, 5)
    assert scheduler.get_last_lr() == [0.1, 0.2]
    optimizer = adamw()
    rates(optimizer, made("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 9}, optimizer), 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_a_skipped_step_moves_nothing():
    optimizer = adamw()
    scheduler = made("OneCycle", RATES["cycle"][1], optimizer)
    optimizer.step()
    hold(scheduler)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.2 and optimizer.param_groups[0]["betas"] == (0.875, 0.99)


def test_one_cycle_leaves_other_momenta_alone():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.7)
    with pytest.warns(UserWarning, match="OneCycle leaves the momentum of SGD alone"):
        scheduler = made("OneCycle", CYCLE, optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["momentum"] == 0.7 and optimizer.param_groups[0]["lr"] == 0.2
    optimizer = adamw()
    made("OneCycle", {**CYCLE, "cycle_momentum": False}, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.filterwarnings("ignore:The epoch parameter", "ignore:Detected call of")
def test_defaults_are_those_of_deepspeed():
    wants = {
        ("LRRangeTest",): [0.001, 0.001 * (1 + 1 / 2000)],
        ("WarmupLR",): [0.0, 0.0, 0.1 * 0.6931471805599453 * (1 / 6.907755278982137)],
        ("WarmupDecayLR", 9000): [0.0, 0.0, 0.001 * 0.6931471805599453 * (1 / 6.907755278982137)],
        ("WarmupCosineLR", 9000): [0.0, 0.0, 0.1 * 0.6931471805599453 * (1 / 6.907755278982137)],
    }
    for (kind, *total), want in wants.items():
        optimizer = adamw()
        params = {"total_num_steps": total[0]} if total else {}
        got = [lr for lr, _ in rates(optimizer, made(kind, params, optimizer), len(want))]
        assert got == pytest.approx(want, rel=1e-14), kind
    optimizer = adamw()
    made("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2}, optimizer).step(60)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.0001
    optimizer = adamw()
    cycle = made("OneCycle", {"cycle_min_lr": 0.25, "cycle_max_lr": 0.5, "decay_lr_rate": 1.0}, optimizer)
    for step, lr, momentum in ((1000, 0.375, 0.85), (2000, 0.5, 0.8), (4000, 0.25, 0.9), (5000, 0.25, 0.9)):
        cycle.step(step)
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]) == pytest.approx((lr, momentum))


def test_auto():
    optimizer = adamw()
    params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "total_num_steps"), "auto") | {"warmup_num_steps": 2}
    check_scheduler({"type": "WarmupDecayLR", "params": params})
    scheduler = made("WarmupDecayLR", params, optimizer, total=10)
    assert scheduler.get_last_lr() == [0.0, 0.0]
    rates(optimizer, scheduler, 3)
    assert scheduler.get_last_lr() == [0.1, 0.2]
    rates(optimizer, scheduler, 4)
    assert scheduler.get_last_lr() == [0.1 * 0.5, 0.2 * 0.5]
    for endless in (float("inf"), -1):
        with pytest.raises(ValueError, match=r"total_num_steps='auto', and the run has no known end .*max_steps"):
            made("WarmupDecayLR", params, adamw(), total=endless)


def test_a_total_below_the_warm_up_is_told():
    with pytest.warns(UserWarning, match="total_num_steps=5 is less than warmup_num_steps=9"):
        made("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 9}, adamw())


@pytest.mark.parametrize("kind", TORCHS)
def test_classes_of_torch_by_name(kind):
    check_scheduler({"type": kind, "params": TORCHS[kind]})
    mine, theirs = adamw(), adamw()
    scheduler = made(kind, TORCHS[kind], mine)
    assert type(scheduler) is getattr(lr_scheduler, kind)
    assert rates(mine, scheduler) == rates(theirs, getattr(lr_scheduler, kind)(theirs, **TORCHS[kind]))


def test_every_scheduler_of_torch_is_made_or_refused():
    assert {*TORCHS, *REFUSED} == {*lr_scheduler.__all__} - {"LRScheduler"}
    assert {*CLASSES} == {*TORCHS} | {kind for kind, *_ in RATES.values()}
    for kind in REFUSED:
        with pytest.raises(ValueError, match=f"'{kind}' cannot be made here: it .* configure_optimizers"):
            check_scheduler({"type": kind, "params": {}})


def test_a_function_makes_one():
    optimizer = adamw()
    make = partial(lr_scheduler.StepLR, step_size=3)
    check_scheduler(make)
    assert make_scheduler(make, optimizer, lambda: 1, MODULE).optimizer is optimizer
    with pytest.raises(TypeError, match="made a int, which is no LRScheduler"):
        make_scheduler(lambda optimizer: 3, optimizer, lambda: 1, MODULE)
    with pytest.raises(ValueError, match="needs a metric"):
        make_scheduler(lr_scheduler.ReduceLROnPlateau, optimizer, lambda: 1, MODULE)


@pytest.mark.parametrize(
    ("kind", "params", "error", "text"),
    [
        ("WarmupLr", {}, ValueError, "type='WarmupLr' is no scheduler. Did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, TypeError, "params.warmup_steps: .* Did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"optimizer": 3}, TypeError, "params.optimizer: WarmupLR has no such setting"),
        ("StepLR", {"stepsize": 3}, TypeError, "params.stepsize: .* Did you mean 'step_size'"),
        ("StepLR", {}, TypeError, "params of StepLR .*'step_size'"),
        ("StepLR", {"step_size": 3, "gamma": "1e-1"}, ValueError, "params.gamma='1e-1' is text"),
        ("WarmupLR", {"warmup_num_steps": 0}, ValueError, "warmup_num_steps=0 must be a whole number, 1 or more"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 2.5}, ValueError, "warmup_num_steps=2.5 must be"),
        ("WarmupLR", {"warmup_type": "liner"}, ValueError, "warmup_type='liner' .* Did you mean 'linear'"),
        ("WarmupLR", {"warmup_max_lr": None, "warmup_min_lr": float("nan")}, ValueError, "warmup_min_lr=nan must be"),
        ("WarmupDecayLR", {}, TypeError, "total_num_steps"),
        ("WarmupCosineLR", {"warmup_max_lr": "auto"}, TypeError, "params.warmup_max_lr: WarmupCosineLR has no such"),
        ("LRRangeTest", {"lr_range_test_step_size": "auto"}, ValueError, "lr_range_test_step_size='auto' is text"),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, ValueError, "lr_range_test_staircase=1 must be True or False"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, ValueError, "cycle_first_step_size=0 must be"),
        ("OneCycle", {**CYCLE, "cycle_min_lr": [1, 2], "cycle_max_lr": [1, 2, 3]}, ValueError, "has [23] values, and"),
        ("WarmupLR", {"last_batch_iteration": 3}, ValueError, "last_batch_iteration=3: .* by a checkpoint"),
    ],
)
def test_what_is_wrong_is_said_at_once(kind, params, error, text):
    for block in (
        {"type": kind, "params": params},
        TrainingConfig(scheduler={"type": kind, "params": params}).scheduler,
    ):
        with pytest.raises(error, match=text):
            check_scheduler(block)
        with pytest.raises(error, match=text):
            make_scheduler(block, adamw(), lambda: 100, MODULE)


def test_lists_are_for_as_many_groups_as_there_are():
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2, 0.3], "last_batch_iteration": -1}}
    check_scheduler(block)
    with pytest.raises(ValueError, match="warmup_max_lr has 3 values, and the optimizer 2 parameter groups"):
        make_scheduler(block, adamw(), lambda: 100, MODULE)


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ({"warmup_steps": 7}, 7),
        ({"warmup_steps": 0}, 1),
        ({"warmup_ratio": 0.05}, 5),
        ({"warmup_steps": 0, "warmup_ratio": 0.031}, 4),
        ({"warmup_steps": 3, "warmup_ratio": 0.5}, 3),
    ],
)
def test_the_warmup_is_that_of_the_module(said, steps):
    module = Module()
    module.hparams = said
    params = {"warmup_num_steps": "auto", "warmup_type": "linear", "warmup_max_lr": 1.0}
    wanted = make_scheduler(
        {"type": "WarmupLR", "params": {**params, "warmup_num_steps": steps}}, adamw(), None, module
    )
    made = make_scheduler({"type": "WarmupLR", "params": params}, adamw(), lambda: 100, module)
    for _ in range(9):
        made.step()
        wanted.step()
        assert made.get_last_lr() == wanted.get_last_lr()


def test_a_warmup_that_nobody_knows_is_said():
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    check_scheduler(block)
    with pytest.raises(ValueError, match="neither warmup_steps nor warmup_ratio"):
        make_scheduler(block, adamw(), lambda: 100, MODULE)
