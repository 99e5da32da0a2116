"""The zoo, before the engine is asked: every model trains, and moves exactly the parameters that it is meant to."""

from functools import partial

import pytest
import torch
import zoo
from oracles import play_all_ranks

STILL = {  # models with parameters that never get a gradient on one rank, and which
    "ZeroElements": ("ghost", "nothing"),
    "Frozen": ("blocks.0.lin.bias", "blocks.1"),
    "Unused": ("ghost", "blocks.1"),
    "NoGradBlock": ("blocks.0", "blocks.1"),
    "Lora": ("original",),
    "Branchy": ("odd",),
    "MixtureOfExperts": ("experts",),
}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_model_trains(name):
    before = dict(zoo.make(name).named_parameters())
    after = play_all_ranks(partial(zoo.make, name), 1)[0].weights
    still = {key for key, value in before.items() if torch.equal(after[key], value)}
    allowed = {key for key in before if any(word in key for word in STILL.get(name, ()))}
    assert still <= allowed, f"{still - allowed} should have moved"
    assert bool(still) == bool(allowed)


def test_a_seed_fixes_the_weights_and_the_data():
    for name in zoo.ZOO:
        models = zoo.make(name, 3), zoo.make(name, 3)
        for mine, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(mine, other)
        batches = [model.batch(1, 2) for model in models]
        assert all(torch.equal(mine, other) for mine, other in zip(batches[0][:2], batches[1][:2], strict=True))
