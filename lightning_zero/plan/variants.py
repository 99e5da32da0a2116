"""Stages and offloads side by side: what each takes, whether it fits, and which is to be preferred."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_zero.plan.account import Account
from lightning_zero.plan.sizes import shown

ROOM = 0.1
"""Of a device's memory, what is left alone: for the CUDA context, what the allocator rounds up, and fragmentation."""

CHOICES = (
    *((stage, "none", "none") for stage in range(4)),
    *((stage, "cpu", "none") for stage in (1, 2, 3)),
    (3, "cpu", "cpu"),
    *((stage, "nvme", "none") for stage in (1, 2, 3)),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)
"""Stage, and where the optimizer's state and the parameters rest: from what costs least time to what costs most.

Without offload, a higher stage sends more. Host memory costs less than a disk.
"""


@dataclass(frozen=True)
class Machine:
    """What there is: bytes of one device, and of a host and its disk, which ``ranks`` devices share."""

    device: int
    host: int
    disk: int
    ranks: int


@dataclass(frozen=True)
class Variant:
    """One of the choices, and what a rank takes in it."""

    stage: int
    optimizer: str
    params: str
    account: Account

    @property
    def name(self) -> str:
        """As in the tables."""
        return label(self.stage, self.optimizer, self.params)

    def misses(self, machine: Machine, room: float = ROOM) -> list[str]:
        """What there is too little of, in words."""
        account = self.account
        needs = (
            ("device", account.device, machine.device * (1 - room)),
            ("host", account.host * machine.ranks, machine.host),
            ("disk", account.disk * machine.ranks, machine.disk),
        )
        return [f"{place} {shown(need)} of {shown(has)}" for place, need, has in needs if need > has]

    def verdict(self, machine: Machine) -> str:
        """``yes``, ``tight`` (not with the room that should be left) or what is missing."""
        if not self.misses(machine):
            return "yes"
        return "tight" if not self.misses(machine, room=0.0) else "no: " + ", ".join(self.misses(machine, room=0.0))


def label(stage: int, optimizer: str = "none", params: str = "none") -> str:
    """A choice in words."""
    name = f"zero{stage}" if stage else "ddp (stage 0)"
    if optimizer == params == "none":
        return name
    if optimizer == params:
        return f"{name}, optimizer and parameters to {optimizer}"
    places = [
        f"{kind} to {place}" for kind, place in (("optimizer", optimizer), ("parameters", params)) if place != "none"
    ]
    return f"{name}, {', '.join(places)}"


def settings(stage: int, optimizer: str, params: str) -> str:
    """The strategy that a choice is."""
    words = [f"stage={stage}"]
    for key, place in (("offload_optimizer", optimizer), ("offload_params", params)):
        if place == "nvme":
            words.append(f'{key}={{"device": "nvme", "nvme_path": ...}}')
        elif place != "none":
            words.append(f'{key}="{place}"')
    return f"ZeroStrategy({', '.join(words)})"


def every(run: Callable[[int, str, str], Account], machine: Machine) -> list[Variant]:
    """All choices that the machine has places for."""
    places = {"none", "cpu", *(["nvme"] if machine.disk else [])}
    return [Variant(*choice, run(*choice)) for choice in CHOICES if {choice[1], choice[2]} <= places]


def recommended(variants: Iterable[Variant], machine: Machine) -> Variant | None:
    """The first that fits with room to spare, or at all; variants come in the order of :data:`CHOICES`."""
    found = list(variants)
    for room in (ROOM, 0.0):
        for variant in found:
            if not variant.misses(machine, room):
                return variant
    return None


def advice(variants: Sequence[Variant], machine: Machine) -> str:
    """Which to take, and why; or what is missing."""
    best = recommended(variants, machine)
    if best is None:
        least = min(variants, key=lambda variant: variant.account.device)
        return (
            f"Nothing fits. The least on the device is {least.name}: {'; '.join(least.misses(machine))}. Use more"
            " devices or larger ones, more host memory or a disk, a smaller micro-batch, or activation checkpointing."
        )
    before = variants[: variants.index(best)]
    words = f"Take {best.name}: {settings(best.stage, best.optimizer, best.params)}."
    if before:
        words += f" What costs less time does not fit: {before[-1].name} needs {', '.join(before[-1].misses(machine))}."
    else:
        words += " Nothing costs less time, and it fits."
    if best.misses(machine):
        words += f" It is tight: less than {ROOM:.0%} of the device is left for what is not counted."
    return words


def table(variants: Sequence[Variant], machine: Machine) -> str:
    """All of them, as Markdown."""
    lines = [
        "| strategy | steady, device | peak, device | host | disk | sent in a step | fits |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        account = variant.account
        sent = account.sent["gather"] + account.sent["reduce"]
        host, disk = (shown(nbytes * machine.ranks) for nbytes in (account.host, account.disk))
        lines.append(
            f"| {variant.name} | {shown(account.steady)} | {shown(account.device)} | {host} | {disk}"
            f" | {sent:.3g} ({account.traffic:.2f} Y) | {variant.verdict(machine)} |"
        )
    return "\n".join(lines)
