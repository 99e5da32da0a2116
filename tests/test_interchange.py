"""Checkpoints of Lightning's other strategies and of torch's tools under ours, and ours under theirs."""

import pytest
import torch
from harness import run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from oracles import assert_same_state
from test_strategy import STAGES, Net, loader, trainer, zero
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


class Parallel(Net):
    """What ModelParallelStrategy asks for; under others ``configure_model`` does nothing. Two groups, and a schedule."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def strategies(name, world_size):
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    return DDPStrategy() if name == "ddp" else zero(int(name), state_dict_type="sharded")


def life(rank, world_size, folder, name, epochs=1, cls=Parallel, load=None, save=None):
    """Train under a strategy from a checkpoint or from the beginning; on rank 0 all that there is in the end."""
    runner = trainer(rank, world_size, folder, strategies(name, world_size), max_epochs=epochs)
    model = cls()
    runner.fit(model, loader(), ckpt_path=load)
    if save is not None:
        runner.save_checkpoint(save)
    return whole(runner, model, name)


def whole(runner, model, name):
    """Weights and optimizer state by names."""
    (optimizer,) = runner.optimizers
    if name == "fsdp2":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        state = get_optimizer_state_dict(model, optimizer, options=options)
    elif name == "ddp":
        weights, state = model.state_dict(), by_name(model, optimizer, optimizer.state_dict())
    else:
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        state = by_name(model, optimizer, runner.strategy._fit_engine.optimizer_state(optimizer))
    return (weights, sorted_state(state)) if runner.global_rank == 0 else None


def by_name(model, optimizer, state):
    if state is None:
        return None
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    groups = [{**group, "params": [order[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[n]: entries for n, entries in state["state"].items()}, "param_groups": groups}


def sorted_state(state):
    return state and {
        "state": {name: dict(sorted(state["state"][name].items())) for name in sorted(state["state"])},
        "param_groups": [dict(sorted(group.items())) for group in state["param_groups"]],
    }


# FSDP2


@pytest.mark.parametrize("stage", STAGES)
def test_fsdp2_and_ours_go_on_from_each_other_to_the_bit(stage, tmp_path):
    theirs, ours = tmp_path / "theirs.ckpt", tmp_path / "ours.ckpt"
    unbroken, *_ = run_ranks(life, 2, tmp_path, "fsdp2", epochs=3)
    first, *_ = run_ranks(life, 2, tmp_path, "fsdp2", epochs=1, save=theirs)
    second, *_ = run_ranks(life, 2, tmp_path, str(stage), epochs=2, load=theirs, save=ours)
    third, *_ = run_ranks(life, 2, tmp_path, "fsdp2", epochs=3, load=ours)
    assert_same_state(third, unbroken)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 1), (1, 2)], ids=str)
def test_fsdp2_and_ours_at_other_sizes(sizes, tmp_path):
    theirs, ours = tmp_path / "theirs.ckpt", tmp_path / "ours.ckpt"
    first, *_ = run_ranks(life, sizes[0], tmp_path, "fsdp2", save=theirs)
    again, *_ = run_ranks(life, sizes[1], tmp_path, "3", load=theirs, save=ours)
    assert_same_state(again, first)
    third, *_ = run_ranks(life, sizes[0], tmp_path, "fsdp2", load=ours)
    assert_same_state(third, first)
