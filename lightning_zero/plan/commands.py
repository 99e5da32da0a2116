"""``python -m lightning_zero plan``."""

import argparse
from functools import partial

from lightning_zero.plan import users
from lightning_zero.plan.account import Account
from lightning_zero.plan.dry_run import Case, dry_run
from lightning_zero.plan.generic import Size, account_of
from lightning_zero.plan.sizes import nbytes
from lightning_zero.plan.tables import PER_HOST, TABLES
from lightning_zero.plan.variants import Machine, advice, every, table

ABOUT = """What a model takes at each stage and with each offload, before anything is bought or started: the engine
itself takes steps with tensors that have no memory. Give a module (--module), a size (--params), or a table (--table).
Sizes: 80GB is 80 * 10^9 bytes, 80GiB is 80 * 2^30, which is what a card sold as 80 GB has."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to ``python -m lightning_zero``."""
    parser = commands.add_parser("plan", help="what a model takes at each stage, and what to use", description=ABOUT)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--module", help="package.module:Class of a LightningModule, or a function that makes one")
    what.add_argument("--params", type=float, help="parameters of a transformer, 7e9 say")
    what.add_argument("--table", choices=sorted(TABLES), help="a table of the README: one to two minutes")
    parser.add_argument("--layers", type=int, help="of the transformer")
    parser.add_argument("--hidden", type=int, help="its width")
    parser.add_argument("--vocab", type=int, default=32000, help="tokens it knows (32000)")
    parser.add_argument("--keep-activations", action="store_true", help="blocks are not checkpointed")
    parser.add_argument("--world-size", type=int, default=8, help="ranks (8)")
    parser.add_argument("--ranks-per-host", type=int, help=f"of one host ({PER_HOST}, or all)")
    parser.add_argument("--device-memory", default="80GiB", help="of one device (80GiB)")
    parser.add_argument("--host-memory", default="1TB", help="of one host (1TB)")
    parser.add_argument("--nvme", default="0B", help="of one host's disk (none)")
    parser.add_argument("--batch", default="1x2048", help="a micro-batch: sizes and dtype of each tensor (1x2048)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step (1)")
    parser.add_argument("--precision", choices=("bf16-true", "32-true"), default="bf16-true")
    parser.add_argument("--gradient-dtype", choices=("fp32", "bf16"), help="what gradients are summed and kept in")


def run(options: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ValueError: an option is wrong; the message says which.
    """
    if options.table:
        print(TABLES[options.table]())
        return
    for name in ("world_size", "accumulate", "ranks_per_host", "layers", "hidden"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more.")
    ranks = options.ranks_per_host or min(options.world_size, PER_HOST)
    machine = Machine(nbytes(options.device_memory), nbytes(options.host_memory), nbytes(options.nvme), ranks)
    found = every(_Runner(options), machine)
    first = found[0].account
    print(f"{first.parameters:,.0f} parameters (Y) on {options.world_size} ranks, {ranks} to a host.\n")
    print(table(found, machine))
    print(
        "\nBytes of a rank when the last gradient is in (steady), and the most in a step, with activations (peak); of a"
        " host and its disk. Not counted: the CUDA context, NCCL, what the allocator rounds up, and the process itself."
    )
    print(f"\n{advice(found, machine)}")


class _Runner:
    """Runs one choice of stage and offload."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._shapes = users.batch(options.batch, options.precision)
        self._size = None if options.module else _size(options, self._shapes[0][0])

    def __call__(self, stage: int, optimizer: str, params: str) -> Account:
        options = self._options
        settings = (("gradient_dtype", options.gradient_dtype),) if options.gradient_dtype else ()
        case = Case(stage, options.world_size, options.precision, options.accumulate, optimizer, params, settings)
        if self._size is not None:
            return account_of(self._size, case)
        return dry_run(partial(users.workload, users.named(options.module), self._shapes), case)


def _size(options: argparse.Namespace, shape: tuple[int, ...]) -> Size:
    if options.layers is None or options.hidden is None:
        raise ValueError("--params needs --layers and --hidden: what is between them depends on both.")
    if len(shape) != 2:
        raise ValueError(f"--batch {options.batch}: the transformer of --params takes sequences x tokens, 1x2048.")
    size = Size(
        *(options.params, options.layers, options.hidden, options.vocab),
        *(*shape, not options.keep_activations),
    )
    print(
        f"Assumed: a decoder of {size.layers} equal blocks of width {size.dim}, feed-forward {size.inner}, vocabulary"
        f" {size.vocabulary} (embedding and output layer apart), AdamW,"
        f" {'blocks checkpointed' if size.checkpointed else 'activations kept'}, attention as FlashAttention."
    )
    return size
