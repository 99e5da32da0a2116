"""Train a GPT ten times larger than the largest that plain Lightning trains in the same memory.

    python examples/bigger_than_memory.py --memory 1.5GB --nvme-path /mnt/nvme

First the largest is looked for that a Trainer with AdamW, in fp32 and in one process, trains within ``--memory``. Then
one of at least ``--factor`` times its parameters is trained as ``zero3_nvme`` does it: it is built on ``meta`` and
filled unit by unit; parameters, gradients and the optimizer's state rest in a file in ``--nvme-path``, 16 bytes for
each parameter, and memory holds a few units and a few windows of the step.

Every training (``one_batch.py``) has a process of its own. Where a control group can be made (Linux, as root) the
process gets no more memory than the limit; everywhere its peak resident memory, all that it imports included, is
compared with the limit.
"""

import argparse
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from one_batch import Run  # imports torch, which only the trainings need

BYTES_PER_PARAMETER = 16  # AdamW in fp32: the weight, its gradient and two moments
UNITS = {"MB": 10**6, "GB": 10**9}
CGROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    """Measure both; the exit code is 0 if the large model was trained within the limit and its loss fell."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the group and the folder go, too
    group = make_group(options.memory)
    try:
        how = "peak resident memory" if group is None else "a control group and by peak resident memory"
        print(f"At most {gigabytes(options.memory)}, checked by {how}.\n\nPlain Trainer, AdamW:", flush=True)
        plain = largest(partial(train, options, group), options)
        layers = plain.layers + math.ceil((options.factor - 1) * plain.parameters / plain.layer_parameters)
        print(f"\nzero3_nvme, {options.factor:g} times as large:", flush=True)
        with tempfile.TemporaryDirectory(prefix="bigger_than_memory_", dir=options.nvme_path) as folder:
            large = train(options, group, layers, folder)
    finally:
        if group is not None:
            group.rmdir()
    if large is None:
        sys.exit(f"zero3_nvme needed more than {gigabytes(options.memory)}: its process was killed.")
    print(f"\n{table({'plain': plain, 'zero3_nvme': large})}", flush=True)
    judge(plain, large, options)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=size, default="1.5GB", help="the limit, in MB or GB (default: 1.5GB)")
    parser.add_argument("--factor", type=float, default=10, help="how many times larger the model is (default: 10)")
    parser.add_argument("--nvme-path", type=Path, default=".", help="a directory on a disk, not tmpfs (default: here)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of a training (default: 6)")
    parser.add_argument("--width", type=int, default=768, help="of the GPT, a multiple of 64 (default: 768)")
    parser.add_argument("--layers", type=int, help="of the plain model (default: as many as fit)")
    parser.add_argument("--length", type=int, default=64, help="bytes of text in the batch (default: 64)")
    options = parser.parse_args()
    if not options.nvme_path.is_dir():
        parser.error(f"--nvme-path: {options.nvme_path} is not a directory")
    if options.steps < 2:
        parser.error("--steps: a loss falls in two steps or more")
    if options.width < 64 or options.width % 64:
        parser.error("--width: not a multiple of 64")
    if options.factor <= 1:
        parser.error("--factor: not above 1")
    return options


def size(text: str) -> int:
    """Bytes of ``1.5GB`` or ``600MB``."""
    if text[-2:] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} ends with neither MB nor GB")
    return int(float(text[:-2]) * UNITS[text[-2:]])


def make_group(nbytes: int) -> Path | None:
    """A control group whose processes get so much memory and no swap; None where none can be made."""
    parent, limit, swap, most = CGROUPS, "memory.max", "memory.swap.max", 0
    if (CGROUPS / "memory").is_dir():  # version 1, in which the limit of swap is that of both together
        parent, limit, swap, most = CGROUPS / "memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", nbytes
    group = parent / f"bigger_than_memory_{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        (group / limit).write_text(str(nbytes))
    except OSError:
        group.rmdir()
        return None
    with suppress(OSError):  # a kernel that does not count swap
        (group / swap).write_text(str(most))
    return group


def largest(train: "Callable[[int], Run | None]", options: argparse.Namespace) -> "Run":
    """The training with ``options.layers`` layers, or else with the most that fit; the smallest gives a first guess."""

    def fitting(layers: int) -> "Run | None":
        run = train(layers)
        return run if run is not None and run.peak <= options.memory else None

    best = fitting(options.layers or 1)
    if best is None:
        sys.exit(f"A plain model of {options.layers or 1} layers does not fit: give more --memory or less --width.")
    if options.layers:
        return best
    layers = max(2, 1 + (options.memory - best.peak) // (BYTES_PER_PARAMETER * best.layer_parameters))
    too_many: float = math.inf
    while best.layers < layers < too_many:
        run = fitting(layers)
        if run is None:
            too_many, layers = layers, layers - 1
        else:
            best, layers = run, layers + 1
    return best


def train(options: argparse.Namespace, group: Path | None, layers: int, folder: str | None = None) -> "Run | None":
    """Train in a new process, as zero3_nvme does if there is a folder for it; None: it was killed."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=train_here, args=(sender, options, group, layers, folder), daemon=True)
    process.start()
    sender.close()  # the other end is the process' alone, so that its end can be noticed
    try:
        run = receiver.recv()
    except EOFError:
        run = None
    except BaseException:  # Ctrl-C, or a signal
        process.kill()
        process.join()
        raise
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        sys.exit(f"The training of {layers} layers failed with exit code {process.exitcode}.")
    if process.exitcode:
        print(f"  {layers} layers: killed, out of memory", flush=True)
        return None
    return run


def train_here(
    sender: Connection, options: argparse.Namespace, group: Path | None, layers: int, folder: str | None
) -> None:
    """What the new process does."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    from one_batch import train_on_one_batch  # once the limit holds, for what is imported counts

    run = train_on_one_batch(layers, options.width, options.length, options.steps, folder)
    print(f"  {layers} layers, {run.parameters / 1e6:.1f} M: peak {gigabytes(run.peak)}", flush=True)
    sender.send(run)


def table(runs: "dict[str, Run]") -> str:
    """A column for every run."""
    rows = [("", *runs)]
    cells = [
        (
            f"{run.layers}",
            f"{run.parameters / 1e6:.1f} M",
            gigabytes(run.peak),
            gigabytes(run.disk),
            f"{median(run.seconds):.2f} s",
            *(f"{loss:.4f}" for loss in run.losses),
        )
        for run in runs.values()
    ]
    labels = ["layers", "parameters", "peak memory", "on disk", "step"]
    labels += [f"loss of step {number + 1}" for number in range(len(cells[0]) - len(labels))]
    rows += zip(labels, *cells, strict=True)
    return "\n".join("".join([row[0].ljust(16), *(cell.rjust(14) for cell in row[1:])]) for row in rows)


def judge(plain: "Run", large: "Run", options: argparse.Namespace) -> None:
    """Say by how much the model is larger; end with an error if the limit was passed or the loss did not fall."""
    if large.peak > options.memory:
        sys.exit(f"The peak of zero3_nvme, {gigabytes(large.peak)}, is above {gigabytes(options.memory)}.")
    if not large.losses[-1] < large.losses[0]:  # also where one is NaN
        sys.exit(
            f"The loss of zero3_nvme did not fall: {large.losses[0]:.4f} at first, {large.losses[-1]:.4f} at last."
        )
    ratio = large.parameters / plain.parameters
    print(f"\nzero3_nvme trained {ratio:.1f} times the parameters in the same {gigabytes(options.memory)}.")


def gigabytes(nbytes: int) -> str:
    """Bytes for a table."""
    return f"{nbytes / 10**9:.2f} GB"


if __name__ == "__main__":
    main()
