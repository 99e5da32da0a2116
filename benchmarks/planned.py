"""Planned against measured: the most that a rank holds on a CPU, by a dry run and by the kernel.

    python benchmarks/planned.py --cases compute traffic --devices 2 4

Measured is resident memory at its highest, over what it was before the model was built. What the process takes by
itself (threads, connections, code that a first step loads) is what a model of next to no size takes, and is added to
the plan. Exits with 1 where that is further off than ``--within``.
"""

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import CASES, Settings
from compare import measure
from model import Net

from lightning_zero.plan.dry_run import Case, Workload, dry_run

RETURN = 2**17
"""Bytes from which on malloc gives freed blocks back: resident is what is in use, as a plan counts."""

STRATEGIES = {
    "zero1": (1, "none", "none"),
    "zero2": (2, "none", "none"),
    "zero3": (3, "none", "none"),
    "zero3_nvme": (3, "nvme", "nvme"),
}
"""Stage and offload of each. Offload to host memory changes nothing on a CPU."""


def workload(settings: Settings) -> Workload:
    """What a rank of the benchmark trains."""
    net = Net(settings, fully_sharded=False)
    batch = torch.zeros(settings.batch, settings.seq + 1, dtype=torch.int64)

    def loss() -> torch.Tensor:
        return F.cross_entropy(net.model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    return Workload(net, net.configure_optimizers, loss)


def planned(name: str, settings: Settings) -> float:
    """Bytes of a rank at their highest."""
    stage, optimizer, params = STRATEGIES[name]
    case = Case(stage, settings.devices, "32-true", 1, optimizer, params, device=torch.device("cpu"))
    return dry_run(partial(workload, settings), case).device


def main() -> None:
    options = _parse()
    worst = 0.0
    print("| ranks | strategy | case | planned, MB | process, MB | measured, MB | both / measured |")
    print("|---|---|---|---|---|---|---|")
    for devices, name in product(options.devices, options.strategies):
        smallest = Settings("small", 8, 1, 1, 8, steps=options.steps, devices=devices, return_memory=RETURN)
        process = measure(name, smallest, options.nvme_path)["peak"]
        for case in options.cases:
            size = CASES[case]
            sizes = size.dim, size.layers, size.batch, size.seq
            settings = Settings(case, *sizes, steps=options.steps, devices=devices, return_memory=RETURN)
            plan, peak = planned(name, settings), measure(name, settings, options.nvme_path)["peak"]
            worst = max(worst, abs((plan + process) / peak - 1))
            megabytes = " | ".join(f"{nbytes / 1e6:.0f}" for nbytes in (plan, process, peak))
            print(f"| {devices} | {name} | {case} | {megabytes} | {(plan + process) / peak:.3f} |", flush=True)
    if worst > options.within:
        sys.exit(f"The plan is off by {worst:.1%}, more than {options.within:.0%}.")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", nargs="+", choices=["compute", "traffic", "small"], default=["compute", "traffic"])
    add("--devices", nargs="+", type=int, default=[2, 4], help="ranks")
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    add("--steps", type=int, default=2, help="after two others (default: %(default)s)")
    add("--within", type=float, default=0.1, help="how far off the plan may be (default: %(default)s)")
    add("--nvme-path", type=Path, metavar="FOLDER", help="where to offload to (default: the temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
