"""The zoo and the oracles, before the engine is asked: every model trains, and the plain loop is DDP to the bit."""

from functools import partial

import pytest
import zoo
from harness import distributed
from oracles import assert_same, train_ddp, train_plain


@pytest.mark.parametrize("name", zoo.ZOO)
def test_model_learns(name):
    model = zoo.make(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    run = train_plain(partial(zoo.make, name), 0, 1)
    assert all((run.weights[key] != value).any() for key, value in before.items()) == (not still(name))


def still(name):
    """Models of which some parameters are meant never to move (or have no element that could)."""
    return name in ("ZeroElements", "Frozen", "Unused", "NoGradBlock", "Lora", "Branchy", "MixtureOfExperts")


@distributed(world_size=2)
@pytest.mark.parametrize("name", [name for name, cls in zoo.ZOO.items() if cls.not_for_ddp is None])
def test_plain_loop_equals_ddp(rank, world_size, name):
    make = partial(zoo.make, name)
    for accumulate in (1, 3):
        want = train_ddp(make, rank, accumulate=accumulate)
        got = train_plain(make, rank, world_size, accumulate=accumulate)
        assert_same(got, want, f"accumulate={accumulate}", buffers=rank == 0)
