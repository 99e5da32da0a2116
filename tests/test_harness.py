"""The harness itself: a harness that lets a failure through makes every other test worthless."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankFailed, distributed, run_ranks


def test_values_come_back_by_rank():
    def body(rank, world_size, base):
        total = torch.tensor([rank])
        dist.all_reduce(total)
        return base + rank, total.item()

    assert run_ranks(body, 3, 10) == [(10, 3), (11, 3), (12, 3)]


def test_the_failure_that_came_first_is_reported_first():
    def body(rank, world_size):
        if rank == 1:
            raise ValueError("the cause")
        dist.all_reduce(torch.zeros(1))  # ends with an error when rank 1 goes

    with pytest.raises(RankFailed) as failure:
        run_ranks(body, 2)
    assert str(failure.value).index("rank 1 failed") < str(failure.value).index("the cause")
    assert "rank 0" not in str(failure.value).partition("the cause")[0]


def test_a_hang_ends_with_the_stacks_of_all_ranks():
    def waits_here(rank, world_size):
        time.sleep(100)

    with pytest.raises(RankFailed) as failure:
        run_ranks(waits_here, 2, timeout=1)
    assert str(failure.value).count("in waits_here") == 2


def test_a_rank_that_dies_is_reported():
    def body(rank, world_size):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(body, 2)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("value", [3])
def test_body_gets_parametrisations_and_fixtures(rank, world_size, value, tmp_path):
    assert dist.get_rank() == rank and dist.get_world_size() == world_size and value == 3
    assert tmp_path.is_dir()


@distributed(world_size=2)
def only_rank_0(rank, world_size):
    assert rank == 0, "said by the body"


def test_body_that_fails_fails_the_test():
    with pytest.raises(pytest.fail.Exception, match="rank 1 failed(.|\n)*said by the body"):
        only_rank_0(world_size=2)
