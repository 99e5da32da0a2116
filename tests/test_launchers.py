"""The ways to make ranks (torchrun, SLURM, the Trainer itself, processes for one fit), and SLURM's signal to them."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forked import TORCHRUN, Program
from harness import distributed, environment, run_ranks
from hosts_fit import fit_on_rank
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors import signal_connector
from test_strategy import STAGES, Net, loader, trainer, zero
from torch.utils.data import ConcatDataset, DataLoader

SCRIPT = Path(__file__).with_name("hosts_fit.py")


def start(*launcher, strategy="zero3", folder, **env):
    return Program(*launcher, str(SCRIPT), "3", "1", strategy, cwd=folder, **env)


def weights(*programs):
    """What rank 0, or the process that has started the ranks, prints about the weights at the end."""
    said = [program.end() for program in programs]
    assert all(code == 0 for _, code in said), said
    (result,) = [line for output, _ in said for line in output.splitlines() if line.startswith("RESULT")]
    return json.loads(result.removeprefix("RESULT"))[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def slurm(rank, port):
    """The variables with which ``srun`` starts one of two ranks, and the port, for tests that run side by side."""
    alike = {"JOB_ID": 1234, "JOB_NAME": "fit", "NODELIST": "127.0.0.1", "NNODES": 1, "NTASKS": 2, "NTASKS_PER_NODE": 2}
    own = {"NODEID": 0, "PROCID": rank, "LOCALID": rank}
    return {"MASTER_PORT": port, **{f"SLURM_{key}": str(value) for key, value in {**alike, **own}.items()}}


@pytest.fixture(scope="module")
def expected():
    """The weights on ranks of the harness, which cost no imports."""
    return run_ranks(fit_on_rank, 2, "zero3")[0][1]


@pytest.mark.full  # test_hosts.py compares torchrun's ranks with the harness's, too
def test_torchrun(expected, tmp_path):
    assert weights(start(*TORCHRUN, "--standalone", "--nproc-per-node", "2", folder=tmp_path)) == expected


def test_slurm(expected, tmp_path):
    port = free_port()
    assert weights(*[start(folder=tmp_path, **slurm(rank, port)) for rank in range(2)]) == expected


@pytest.mark.parametrize(
    "strategy",
    ["zero3_notebook", *(pytest.param(f"zero3{end}", marks=pytest.mark.full) for end in ("", "_fork", "_spawn"))],
)
def test_the_trainer_starts_the_ranks(strategy, expected, tmp_path):
    assert weights(start(strategy=strategy, folder=tmp_path)) == expected


FAILS = """
import hosts_fit
from test_strategy import Net

def training_step(self, batch, batch_idx):
    if batch_idx == 2 and self.global_rank == {rank}:
        raise ValueError("this rank is wrong")
    return plain(self, batch, batch_idx)

plain, Net.training_step = Net.training_step, training_step
try:
    hosts_fit.fit("zero3")
except Exception as error:
    if not {caught}:
        raise
    print(error)
    Net.training_step = plain
    hosts_fit.fit("zero3")
"""


@pytest.mark.parametrize(
    ("rank", "caught"),
    [(0, False), (1, True), *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, True), (1, False)))],
)
def test_a_rank_that_fails_leaves_words_and_no_rank_aborts(rank, caught):
    """Interpreters that end while threads wait in gloo; rank 0 holds the store that the words are in."""
    options, port = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}, free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS.format(rank=rank, caught=caught)],
            env=environment(SCRIPT.parent, *sys.path, **slurm(number, port)),
            **options,
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=120)[not caught] for process in ranks]
    assert [process.returncode for process in ranks] == ([0, 0] if caught else [1, 1]), said
    assert said[rank].splitlines()[0 if caught else -1].endswith("this rank is wrong")
    assert f"rank {rank} failed: ValueError: this rank is wrong" in said[1 - rank]


class Signalled(Net):
    """Gets SLURM's signal on one rank, between two blocks of a forward."""

    def __init__(self, rank, batch):
        super().__init__()
        self.rank, self.batch = rank, batch
        self.blocks[1].register_forward_hook(self.send)

    def training_step(self, batch, batch_idx):
        self.now = batch_idx == self.batch and self.global_rank == self.rank
        return super().training_step(batch, batch_idx)

    def send(self, *_):
        if self.training and self.now:
            os.kill(os.getpid(), signal.SIGUSR1)


class Batches(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch_idx)


@distributed(world_size=2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_of_slurm_to_one_rank_saves_on_all(rank, world_size, stage, accumulate, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(signal_connector, "call", lambda command: calls.append(command) or 0)
    os.environ.update(slurm(rank, "1"))
    alike = ConcatDataset([loader(1).dataset] * 32)  # a resumed fit begins the epoch's data anew
    data = DataLoader(alike, batch_size=2)

    def run(model):
        batches = Batches()
        kwargs = {"callbacks": [batches], "accumulate_grad_batches": accumulate}
        trainer(rank, world_size, tmp_path, zero(stage), **kwargs).fit(model, data)
        return batches.seen

    straight, again = Signalled(rank=1, batch=3), Signalled(rank=1, batch=-1)
    assert run(straight) == list(range(8))
    assert calls == ([["scontrol", "requeue", "1234"]] if rank == 0 else [])
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert run(again) == list(range(5 if accumulate == 1 else 6, 8))  # Lightning finds the file by itself
    for name, value in again.state_dict().items():
        assert value.equal(straight.state_dict()[name]), name
