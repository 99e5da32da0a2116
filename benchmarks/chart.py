"""A chart of a comparison, beside its results; needs matplotlib.

python benchmarks/chart.py benchmarks/results/FILE.jsonl
"""

import sys
from pathlib import Path
from typing import Any

from table import MB, heading, load, summarize

COLORS = {"ddp": "#8c8c8c", "zero": "#1f6fb4", "fsdp": "#d9822b", "deep": "#5b9e5a"}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG: step time as a ratio to the first strategy, bytes sent in a step and peak memory, a bar for each.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = summarize(runs)
    figure = Figure(figsize=(12, 1.8 + 0.4 * len(rows)), layout="constrained")
    ratio, sent, peak = figure.subplots(1, 3, sharey=True)
    _bars(ratio, rows, [row["ratio"] for row in rows], f"step time, {rows[0]['strategy']} = 1", "{:.2f}")
    under = [number + 0.25 for number in range(len(rows))]  # the label
    ratio.errorbar([row["ratio"] for row in rows], under, xerr=_errors(rows), fmt="none", color="black")
    ratio.axvline(1, color="black", linewidth=0.8, linestyle=":")
    _bars(sent, rows, [row["sent"] / MB for row in rows], "sent by a rank in a step, MB", "{:,.1f}")
    _bars(peak, rows, [row["peak"] / MB for row in rows], "peak memory of a rank, MB", "{:,.0f}")
    figure.suptitle("\n".join(heading(runs)), fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def _bars(axes: Any, rows: list[dict[str, Any]], values: list[float], title: str, form: str) -> None:
    names = [row["strategy"] for row in rows]
    bars = axes.barh(range(len(rows)), values, color=[COLORS[name[:4]] for name in names], height=0.7)
    axes.bar_label(bars, [form.format(value) for value in values], label_type="center", color="white")
    axes.set_yticks(range(len(rows)), names)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


def _errors(rows: list[dict[str, Any]]) -> list[list[float]]:
    """How far below and above the ratio the rounds lie."""
    return [[row["ratio"] - row["ratios"][0] for row in rows], [row["ratios"][1] - row["ratio"] for row in rows]]


if __name__ == "__main__":
    results = Path(sys.argv[1])
    draw(load(results), results.with_suffix(".png"))
