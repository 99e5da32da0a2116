"""One thread per process, set before torch can start a pool: ranks would wait for threads that fork does not copy.

Ranks are more than the cores, and where Linux lets a thread that wakes up take the place of one that holds the lock of
a gloo connection, gloo's own thread spins until the holder runs again: a third of all time in the kernel. Processes of
the batch class are not put aside at a wake-up.
"""

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

gc.disable()  # until the tests are collected
with suppress(AttributeError, OSError):  # no Linux, or a sandbox that forbids it
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # ranks and scripts that the tests start inherit it
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import torch  # noqa: E402
from harness import make_forks_cheap  # noqa: E402

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="every stage with every model at every world size: twice the time"
    )


def pytest_collection_modifyitems(config, items):
    # first: mallinfo2 counts the holes in the heap one by one, and a thousand tests leave many
    items.sort(key=lambda item: item.path.name != "test_memory.py")
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    make_forks_cheap()
    gc.enable()


@pytest.fixture
def full(request):
    """Whether the tests should leave no combination out."""
    return request.config.getoption("--full")


@pytest.fixture(autouse=True)
def fork_safe():
    """Fail loudly when a test leaves this process in a state in which its forked ranks could not work."""
    yield
    assert torch.get_num_threads() == 1, "a test has changed the number of threads"
    assert not torch.cuda.is_initialized(), "a test has started CUDA in the process that forks the ranks"
    assert not torch.distributed.is_initialized(), "a test has left a process group behind"


@pytest.fixture(autouse=True)
def same_environment():
    """Fail loudly when a test leaves variables behind by which a script would take itself for a rank."""
    yield
    assert "LOCAL_RANK" not in os.environ, "a test has made this process a rank"
