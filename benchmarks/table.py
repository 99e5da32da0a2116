"""The table of a comparison, from its runs.

python benchmarks/table.py benchmarks/results/FILE.jsonl
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

MB = 1e6
HEADER = ("strategy", "median s", "best s", "ratio", "of rounds", "sent MB", "peak MB", "last loss")


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each strategy, in the order of their first runs; ratios are to the first one.

    The time of a run is the median of its steps. ``median`` is that of the runs, ``best`` the shortest step of all;
    ``ratio`` is the median over rounds of the quotient of two runs of one round, so that what changes between rounds
    cancels, and ``ratios`` are the least and the largest quotient.
    """
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_name.setdefault(run["strategy"], {})[run["round"]] = run
    base = next(iter(by_name.values()))
    return [_row(name, rounds, base) for name, rounds in by_name.items()]


def _row(name: str, rounds: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> dict[str, Any]:
    times = {number: median(run["seconds"]) for number, run in rounds.items()}
    ratios = [time / median(base[number]["seconds"]) for number, time in times.items() if number in base]
    return {
        "strategy": name,
        "median": median(times.values()),
        "best": min(second for run in rounds.values() for second in run["seconds"]),
        "ratio": median(ratios),
        "ratios": (min(ratios), max(ratios)),
        "sent": median(run["sent"] for run in rounds.values()),
        "peak": max(run["peak"] for run in rounds.values()),
        "loss": list(rounds.values())[-1]["loss"],
    }


def render(runs: list[dict[str, Any]]) -> str:
    """The table as plain text, under a line that says what was run, on what and with what."""
    rows = [HEADER, *(_cells(row) for row in summarize(runs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([*heading(runs), "", *lines])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    least, largest = row["ratios"]
    return (
        row["strategy"],
        *(f"{row[key]:.4f}" for key in ("median", "best")),
        f"{row['ratio']:.3f}",
        f"{least:.2f}-{largest:.2f}",
        *(f"{row[key] / MB:,.1f}" for key in ("sent", "peak")),
        f"{row['loss']:.5f}",
    )


def heading(runs: list[dict[str, Any]]) -> list[str]:
    """What was run, and the machine and versions of it."""
    run, rounds = runs[0], 1 + max(run["round"] for run in runs)
    settings, machine = run["settings"], run["machine"]
    what = "case {case} (dim {dim}, layers {layers}, batch {batch} x {seq}), {precision}, {devices} ranks"
    steps = f"rounds {rounds}, measured steps {settings['steps']}, micro-batches a step {settings['accumulate']}"
    malloc = settings["return_memory"]
    returned = "" if malloc is None else f"; freed blocks from {malloc:,} bytes on go back to the system"
    return [
        f"{what.format(**settings)}, {run['parameters'] / 1e6:,.3f} M parameters",
        f"{steps}; ratios to {run['strategy']}, round by round{returned}",
        f"{machine['cpu']}, {machine['cores']} cores; {_join(run['versions'])}; {run['date']}",
    ]


def _join(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def load(path: Path) -> list[dict[str, Any]]:
    """The runs of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    print(render(load(Path(sys.argv[1]))))
