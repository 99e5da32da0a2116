"""The tables of the ZeRO paper and of this README, made by dry runs."""

from collections.abc import Callable

from lightning_zero.plan.dry_run import Case
from lightning_zero.plan.generic import Size, account_of
from lightning_zero.plan.sizes import GIB
from lightning_zero.plan.variants import Machine, Variant

RANKS = (1, 4, 16, 64, 256, 1024)

PAPER = {
    "7.5B": Size(7.5e9, 66, 3072, seq=16),
    "128B": Size(128e9, 159, 8192, seq=16),
    "1T": Size(1e12, 128, 25600, seq=16),
}
"""The models of the paper's table 1 (arXiv 1910.02054). States do not depend on the tokens."""

FORMULAS = {1: (4, 12), 2: (2, 14), 3: (0, 16)}
"""Bytes for each parameter of a stage: on every rank, and shared by all of them."""


def _states(stage: int, world_size: int) -> Case:
    """What the paper counts: 16-bit gradients at stages 1 and 2. At stage 3 there is no 16-bit copy of a shard, and
    gradients are fp32.
    """
    settings = (("gradient_dtype", "bf16"),) if stage < 3 else ()
    return Case(stage, world_size, micro_batches=2 if stage == 1 else 1, settings=settings)


def paper(models: tuple[str, ...] = tuple(PAPER), ranks: tuple[int, ...] = RANKS) -> str:
    """Bytes of a rank's states, in GB (10^9), for zero1 / zero2 / zero3."""
    lines = [f"| ranks | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    largest = 0.0
    for count in ranks:
        cells = []
        for model in models:
            numbers = []
            for stage, (whole, shared) in FORMULAS.items():
                account = account_of(PAPER[model], _states(stage, count), only_states=True)
                expected = (whole + shared / count) * PAPER[model].parameters
                largest = max(largest, abs(account.steady / expected - 1))
                numbers.append(_digits(account.steady / 1e9))
            cells.append(" / ".join(numbers))
        lines.append(f"| {count} | {' | '.join(cells)} |")
    note = (
        "GB (10^9 bytes) of a rank's states when the last gradient of a step is in: zero1 (micro-batches summed) /"
        f" zero2 / zero3, counted. Largest distance from 4Y + 12Y/N, 2Y + 14Y/N and 16Y/N: {largest:.2%}."
    )
    return "\n".join([*lines, "", note])


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


LLAMA = {
    "7B": Size(6.738e9, 32, 4096, 32000),
    "13B": Size(13.016e9, 40, 5120, 32000),
    "70B": Size(68.977e9, 80, 8192, 32000),
}
"""Of Llama 2, each with one sequence of 2048 tokens for a micro-batch, and checkpointed blocks."""

CARDS = {"A100-40": 40 * GIB, "A100-80": 80 * GIB, "RTX 4090": 24 * GIB}

Row = tuple[str, int, str, tuple[tuple[int, str, str], ...]]

FITS: tuple[Row, ...] = (
    ("7B", 4, "A100-40", ((2, "none", "none"), (3, "none", "none"), (2, "cpu", "none"))),
    ("13B", 4, "A100-40", ((3, "none", "none"), (2, "cpu", "none"), (3, "cpu", "none"))),
    ("70B", 8, "A100-80", ((3, "none", "none"), (3, "cpu", "none"), (3, "nvme", "none"))),
    ("70B", 16, "A100-80", ((3, "none", "none"),)),
    ("70B", 32, "A100-80", ((3, "none", "none"),)),
    ("70B", 4, "RTX 4090", ((3, "cpu", "none"), (3, "cpu", "cpu"), (3, "nvme", "cpu"), (3, "nvme", "nvme"))),
)
"""Models, devices, and the choices that are worth a look there."""

PER_HOST = 8
"""Devices of a host, where there are so many."""


def fits(rows: tuple[Row, ...] = FITS) -> str:
    """What needs what: of each device, and of each host and its disk."""
    lines = [
        "| model | devices | strategy | gradients | device, GiB | host, GiB | disk, GiB | fits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, count, card, choices in rows:
        machine = Machine(CARDS[card], 2**60, 2**60, min(count, PER_HOST))
        for stage, optimizer, params in choices:
            for dtype in ("fp32", "bf16"):
                case = Case(stage, count, optimizer=optimizer, params=params, settings=(("gradient_dtype", dtype),))
                variant = Variant(stage, optimizer, params, account_of(LLAMA[model], case))
                account = variant.account
                needs = account.device, account.host * machine.ranks, account.disk * machine.ranks
                sizes = " | ".join(f"{nbytes / GIB:.1f}" if nbytes > GIB / 20 else "-" for nbytes in needs)
                verdict = variant.verdict(machine).partition(":")[0]
                lines.append(f"| {model} | {count} x {card} | {variant.name} | {dtype} | {sizes} | {verdict} |")
                if verdict == "yes" or account.device > 1.25 * machine.device:
                    break  # with gradients of half the bytes it fits, too, or does not
    note = (
        f"The most in a step, counted: states, one sequence of 2048 tokens with checkpointed blocks, logits, and"
        f" buffers; bf16-true with fp32 masters. Hosts have {PER_HOST} devices or all. *tight*: less than 10 % is left"
        " for the CUDA context, NCCL, rounding and fragmentation, which are not counted."
    )
    return "\n".join([*lines, "", note])


def traffic(
    world_size: int = 64, stages: tuple[int, ...] = (0, 1, 2, 3), micro_batches: tuple[int, ...] = (1, 2, 4)
) -> str:
    """Elements that a rank sends in a step, as multiples of Y (N-1)/N."""
    lines = [
        f"| strategy | {' | '.join(f'A = {count}' for count in micro_batches)} |",
        "|---" * (len(micro_batches) + 1) + "|",
    ]
    for stage in stages:
        cells = []
        for count in micro_batches:
            account = account_of(PAPER["7.5B"], Case(stage, world_size, micro_batches=count))
            cells.append(f"{account.traffic * world_size / (world_size - 1):.3f}")
        lines.append(f"| {'ddp' if stage == 0 else f'zero{stage}'} (stage {stage}) | {' | '.join(cells)} |")
    note = (
        f"Elements that each of {world_size} ranks sends in a step of A micro-batches, as multiples of Y (N-1)/N,"
        " counted on 7.5B parameters (2, 2, A+1, at most 3A). At zero3 a forward's last unit stays for the backward."
    )
    return "\n".join([*lines, "", note])


TABLES: dict[str, Callable[[], str]] = {"paper": paper, "fits": fits, "traffic": traffic}
