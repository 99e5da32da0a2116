"""Optimizers by name: the classes and defaults that DeepSpeed would take, "auto", Lion, and what is refused."""

from functools import partial

import pytest
import torch
import zoo
from harness import distributed
from oracles import assert_same, assert_same_state, communicator, train_engine
from torch import nn, optim

from lightning_zero.config import TrainingConfig
from lightning_zero.engine import check_elementwise
from lightning_zero.engine.elementwise import STOCK, check_state_moves, takes_one_by_one
from lightning_zero.optim.lion import Lion
from lightning_zero.optim.optimizers import check_optimizer, make_optimizer


class Module(nn.Linear):
    """As much of a LightningModule as is looked at."""

    def __init__(self, hparams=None, **attributes):
        super().__init__(2, 2)
        self.hparams = hparams or {}
        vars(self).update(attributes)


def block(kind, **params):
    return TrainingConfig(optimizer={"type": kind, "params": params}).optimizer


def made(kind, module=None, **params):
    check_optimizer(block(kind, **params))
    return make_optimizer(block(kind, **params), module or Module())


@pytest.mark.parametrize(
    ("kind", "params", "cls", "defaults"),
    [
        ("Adam", {}, optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("adamw", {}, optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, optim.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, optim.Adam, {"weight_decay": 0}),
        ("ADAM", {"adam_w_mode": False, "betas": [0.8, 0.9]}, optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False, "weight_decay": 0.1}, optim.AdamW, {"weight_decay": 0.1}),
        ("Adam", {"bias_correction": True, "amsgrad": True, "set_grad_none": False}, optim.AdamW, {"amsgrad": True}),
        ("Adam", {"fp32_optimizer_states": True, "fused": True}, optim.AdamW, {"fused": True}),
        ("Adagrad", {"amsgrad": False}, optim.Adagrad, {"lr": 0.01, "eps": 1e-10, "weight_decay": 0}),
        ("Lion", {"set_grad_none": True}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0}),
        ("Rprop", {"etas": [0.4, 1.3]}, optim.Rprop, {"etas": (0.4, 1.3), "lr": 0.01}),
    ],
)
def test_classes_and_defaults(kind, params, cls, defaults):
    optimizer = made(kind, **params)
    assert type(optimizer) is cls
    assert defaults.items() <= optimizer.param_groups[0].items()
    check_elementwise(optimizer)


def test_every_elementwise_optimizer_of_torch_has_its_name():
    for cls in STOCK - {optim.Adam}:
        assert type(made(cls.__name__)) is cls


@pytest.mark.parametrize(
    ("kind", "params", "error", "text"),
    [
        ("AdamX", {}, ValueError, "optimizer.type='AdamX' is no optimizer. Did you mean 'Adam"),
        ("Optimizer", {}, ValueError, "optimizer.type='Optimizer' is no optimizer"),
        ("AdamW", {"wieght_decay": 0.1}, TypeError, "optimizer.params.wieght_decay: .* Did you mean 'weight_decay'"),
        ("SGD", {"betas": [0.9, 0.99]}, TypeError, "optimizer.params.betas: SGD has no such setting"),
        ("SGD", {"params": []}, TypeError, "optimizer.params.params: SGD has no such setting"),
        ("Adam", {"decoupled_weight_decay": False}, TypeError, "params.decoupled_weight_decay: Adam has no such"),
        ("AdamW", {"max_grad_norm": 1.0}, ValueError, "max_grad_norm .* gradient_clipping"),
        ("Adam", {"bias_correction": False}, ValueError, "params.bias_correction=False must be True for Adam"),
        ("Lion", {"fp32_optimizer_states": False}, ValueError, "params.fp32_optimizer_states=False must be True"),
        ("Adagrad", {"amsgrad": True}, ValueError, "params.amsgrad=True must be False for Adagrad"),
        ("Adam", {"adam_w_mode": "no"}, ValueError, "params.adam_w_mode='no' must be True or False"),
        ("Adam", {"lr": "1e-3"}, ValueError, "optimizer.params.lr='1e-3' is text"),
        ("Adam", {"lr": -1.0}, ValueError, "optimizer.params of AdamW .*Invalid learning rate"),
        ("AdamW", {"betas": [0.9]}, ValueError, r"optimizer.params.betas=\[0.9\] must be two numbers"),
        ("AdamW", {"betas": 0.9}, ValueError, "optimizer.params.betas=0.9 must be two numbers"),
        ("Lion", {"betas": [0.9, 1.0]}, ValueError, r"betas=\(0.9, 1.0\) must be two numbers from 0 to below 1"),
        ("Lion", {"weight_decay": -1}, ValueError, "weight_decay=-1 must be 0 or more"),
        ("SGD", {"momentum": "auto"}, ValueError, "optimizer.params.momentum='auto' is not known"),
        *[(kind, {}, ValueError, f"'{kind}' .*DeepSpeed has removed it") for kind in ("OneBitAdam", "ZeroOneAdam")],
        *[(kind, {}, ValueError, f"'{kind}' .*the package mup") for kind in ("MuAdam", "MuAdamW", "MuSGD")],
        ("OneBitLamb", {}, ValueError, "DeepSpeed has removed it"),
        ("LAMB", {}, ValueError, "'LAMB' .*norms of whole parameters"),
        ("Muon", {}, ValueError, "'Muon' .*orthogonalises whole matrices"),
        *[(kind, {}, ValueError, f"'{kind}' cannot run on") for kind in ("LBFGS", "SparseAdam", "Adafactor")],
    ],
)
def test_what_is_wrong_is_said_at_once(kind, params, error, text):
    for refuse in (check_optimizer, lambda chosen: make_optimizer(chosen, Module())):
        with pytest.raises(error, match=text):
            refuse(block(kind, **params))


AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")


@pytest.mark.parametrize(
    ("module", "want"),
    [
        ({"lr": 0.3}, {"lr": 0.3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ({"hparams": {"learning_rate": 0.2, "betas": [0.5, 0.6]}}, {"lr": 0.2, "betas": (0.5, 0.6)}),
        ({"hparams": {"lr": 0.2}, "lr": 0.3, "adam_beta2": 0.7}, {"lr": 0.2, "betas": (0.9, 0.7)}),
        (
            {"hparams": {"lr": 1, "adam_beta1": 0.1, "adam_epsilon": 1e-3, "weight_decay": 0.5}},
            {"lr": 1, "betas": (0.1, 0.999), "eps": 1e-3, "weight_decay": 0.5},
        ),
    ],
)
def test_auto_is_what_the_module_says(module, want):
    assert want.items() <= made("AdamW", Module(**module), **AUTO).param_groups[0].items()


def test_auto_without_an_answer():
    with pytest.raises(ValueError, match="lr='auto', and neither Module.hparams nor Module has lr or learning_rate"):
        made("AdamW", Module(), **AUTO)
    with pytest.raises(ValueError, match="looked up in Module, whose lr is '1e-3' and no number"):
        made("AdamW", Module(lr="1e-3"), **AUTO)


def test_frozen_parameters_are_left_out_unless_all_are():
    module = Module()
    module.bias.requires_grad_(False)
    makers = (block("SGD"), partial(optim.SGD, lr=0.1))
    for chosen in makers:
        check_optimizer(chosen)
        (group,) = make_optimizer(chosen, module).param_groups
        assert [id(p) for p in group["params"]] == [id(module.weight)]
    module.weight.requires_grad_(False)
    for chosen in makers:
        assert len(make_optimizer(chosen, module).param_groups[0]["params"]) == 2
    with pytest.raises(TypeError, match="made a int, which is no torch.optim.Optimizer"):
        make_optimizer(len, module)


def test_lion_is_algorithm_2_of_the_paper():
    torch.manual_seed(0)
    weight, mean = torch.randn(5, 3), torch.zeros(5, 3)
    p, idle = nn.Parameter(weight.clone()), nn.Parameter(torch.ones(2))
    lion = Lion([p, idle], lr=0.1, betas=(0.8, 0.6), weight_decay=0.5)
    for _ in range(4):
        grad = torch.randn(5, 3)
        grad[0] = 0.0
        p.grad = grad.clone()
        weight = weight - 0.1 * (torch.sign(0.8 * mean + 0.2 * grad) + 0.5 * weight)
        mean = 0.6 * mean + 0.4 * grad
        lion.step()
        torch.testing.assert_close(p.detach(), weight)
    torch.testing.assert_close(lion.state[p]["exp_avg"], mean)
    assert torch.equal(idle.detach(), torch.ones(2)) and idle not in lion.state


def test_lion_takes_a_closure():
    p = nn.Parameter(torch.ones(2))
    lion = Lion([p], lr=0.25)

    def closure():
        loss = (p * 3).sum()
        loss.backward()
        return loss

    assert lion.step(closure).item() == 6.0
    assert p.tolist() == [0.75, 0.75]


def test_lion_may_be_sharded_and_offloaded():
    lion = made("Lion", lr=0.01)
    check_elementwise(lion)
    check_state_moves(lion)
    assert takes_one_by_one(lion)


@distributed(world_size=2)
def test_sharded_lion_equals_the_whole(rank, world_size):
    """To the bit, weights and state."""
    make, chosen = partial(zoo.make, "Wide"), block("Lion", lr=0.01, weight_decay=0.1)

    def lion(named):
        module = nn.ParameterList([p for _, p in named])
        return make_optimizer(chosen, module)

    with communicator() as comm:
        want, got = (
            train_engine(make, comm, stage=stage, tile_size=64, with_state=True, optimizer=lion) for stage in (0, 2)
        )
    assert_same(got, want)
    assert_same_state(got.state, want.state)
    if rank == 0:
        assert all(state["exp_avg"].abs().sum() > 0 for state in got.state["state"].values())
