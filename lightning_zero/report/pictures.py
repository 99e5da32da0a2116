"""Draws a timeline and a picture of memory; needs matplotlib."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_zero.report.memory import Sample
from lightning_zero.report.timeline import Span

# Okabe and Ito's colours, which colour-blind people can tell apart
SKY, BLUE, GREEN, ORANGE, RED = "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00"
PURPLE, YELLOW, GREY, DARK = "#CC79A7", "#F0E442", "#BBBBBB", "#555555"

ROWS = {
    "phase": "the step",
    "unit": "units",
    "wait": "standing still",
    "gather": "gathers",
    "reduce": "reductions",
    "read": "reads",
    "write": "writes",
}
KINDS = {
    "forward": ("forward", SKY),
    "backward": ("backward", BLUE),
    "optimizer": ("optimizer step", GREEN),
    "wait": ("computation waits", RED),
    "gather": ("parameters are gathered", ORANGE),
    "reduce": ("gradients are reduced", PURPLE),
    "read": ("read from a tier", GREY),
    "write": ("written to a tier", DARK),
}
CAPTION = (
    "Gathers, reductions, reads and writes go on beside the computation; 'standing still' is when it waited for one. A"
    " unit's bar has its name, or how that ends."
)
STACK = {
    "optimizer": ("optimizer state, this rank's part", BLUE),
    "master": ("shards of the parameters (master weights)", SKY),
    "parameters": ("whole parameters", ORANGE),
    "gradients": ("gradients", PURPLE),
    "reducing": ("gradients under way in a reduction", RED),
    "windows": ("windows between tier and use", YELLOW),
    "buffers": ("free, kept for reuse", "#888888"),
}
OTHER = "activations and other"
IN_TIERS = {"offload_optimizer": "optimizer state, masters and gradients", "offload_params": "parameters"}
MOST_WORDS = 9
"""Phases that get their name into the picture of memory: with more of them the words would cover one another."""


def check() -> None:
    """See whether pictures can be drawn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import_module("matplotlib.figure")
    except ImportError as missing:
        raise ImportError(
            f"Pictures are drawn with matplotlib, which cannot be imported ({missing}): pip install 'matplotlib>=3.10'."
        ) from None


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)


def timeline_figure(spans: Sequence[Span], title: str) -> Any:
    """One rank's step: a row for each kind of thing, time from left to right."""
    figure, axes = _figure(title, 14, 4.4)
    rows = [row for row in ROWS if any(span.row == row for span in spans)]
    origin = min(span.begin for span in spans)
    length = max(span.end for span in spans) - origin
    scale, unit = (1e3, "ms") if length < 10 else (1.0, "s")
    used = []
    for place, row in enumerate(rows):
        for kind in KINDS:
            bars = [span for span in spans if span.row == row and _kind(span) == kind]
            if bars:
                where = [((span.begin - origin) * scale, (span.end - span.begin) * scale) for span in bars]
                named = row in ("phase", "unit", "gather", "reduce")
                color, inches = KINDS[kind][1], 11.5 / (length * scale)
                # a white edge would hide a thin bar, and show its neighbour's end
                edges = ["white" if named and width * inches > 0.05 else color for _, width in where]
                axes.broken_barh(where, (place - 0.4, 0.8), facecolors=color, edgecolors=edges, linewidth=0.5)
                used.append(kind)
                if named:
                    _name(axes, bars, where, place, inches)
    axes.set_yticks(range(len(rows)), [ROWS[row] for row in rows])
    axes.set_xlim(0, length * scale)
    axes.invert_yaxis()
    axes.set_xlabel(f"time, {unit}\n{_sums(spans, length, scale, unit)}\n{CAPTION}", fontsize=9)
    _legend(figure, [KINDS[kind] for kind in KINDS if kind in used])
    return figure


def _kind(span: Span) -> str:
    return span.name.split(" ")[0] if span.row in ("phase", "unit") else span.row


def _name(axes: Any, spans: Sequence[Span], where: Sequence[tuple[float, float]], place: float, inches: float) -> None:
    """Write names of units and phases, or how they end, into the bars that are long enough."""
    for span, (begin, length) in zip(spans, where, strict=True):
        room = length * inches / 0.075  # characters
        name = span.unit or span.name
        words = [text for text in (name, name.rpartition(".")[2]) if len(text) <= room]
        if words:
            color = "white" if _kind(span) in ("backward", "optimizer") else "black"
            axes.text(begin + length / 2, place, words[0], ha="center", va="center", fontsize=7, color=color)


def _sums(spans: Sequence[Span], length: float, scale: float, unit: str) -> str:
    def total(row: str, begins: str) -> str:
        return f"{scale * sum(s.end - s.begin for s in spans if s.row == row and s.name.startswith(begins)):.1f}"

    phases = ", ".join(f"{name} {total('phase', name)}" for name in ("forward", "backward", "optimizer step"))
    waits = f"waited for gathers {total('wait', 'wait for gather')}, for reductions {total('wait', 'wait for reduce')}"
    return f"Of {length * scale:.1f} {unit}: {phases}; {waits}"


def series(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """Bytes by kind, from the bottom of the picture to its top, with ``OTHER`` where the whole is known; what is
    nought all the time is left out.

    The whole holds libraries, too, on a CPU: ``OTHER`` is what exceeds its least value.
    """
    found = {kind: [sample.nbytes.get(kind, 0) for sample in samples] for kind in STACK}
    found = {kind: values for kind, values in found.items() if any(values)}
    if rest := _rest(samples):
        found[OTHER] = [value - min(rest) for value in rest]
    return found


def _rest(samples: Sequence[Sample]) -> list[int]:
    """Bytes that are of no kind; empty where the whole is not known."""
    known = [(sample.total, sum(sample.nbytes.get(kind, 0) for kind in STACK)) for sample in samples]
    return [total - kinds for total, kinds in known if total is not None]


def memory_figure(samples: Sequence[Sample], title: str) -> Any:
    """One rank's memory over a step, by kind."""
    figure, axes = _figure(title, 14, 6)
    stack = series(samples)
    tops = [sum(values) for values in zip(*stack.values(), strict=True)]
    highest = max(tops)
    per, unit = next((per, unit) for per, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if highest >= per)
    times = [sample.seconds * 1e3 for sample in samples]
    labelled = {kind: STACK.get(kind, (OTHER, "#DDDDDD")) for kind in stack}
    heights = [[value / per for value in values] for values in stack.values()]
    axes.stackplot(times, heights, colors=[color for _, color in labelled.values()], step="post")
    phases = list(_phases(samples))
    for name, begin in phases:
        axes.axvline(begin * 1e3, color=DARK, linewidth=0.7, linestyle=":")
        if len(phases) <= MOST_WORDS:
            side = "right" if begin * 1e3 > 0.9 * times[-1] else "left"
            words = {"transform": axes.get_xaxis_transform(), "fontsize": 8, "color": DARK, "ha": side}
            axes.text(begin * 1e3, 1.01, f" {name} ", **words)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, highest / per * 1.08)
    axes.axhline(highest / per, color=DARK, linewidth=0.7, linestyle="--")
    most = samples[tops.index(highest)]
    peak = f" most: {highest / per:.1f} {unit}, at '{most.event.replace('_', ' ')}'"
    axes.text(times[0], highest / per, peak, va="bottom", fontsize=8, color=DARK)
    axes.set_xlabel("\n".join(["time, ms (without what measuring took)", *_left_out(samples)]), fontsize=9)
    axes.set_ylabel(f"memory, {unit}")
    _legend(figure, list(labelled.values())[::-1], columns=1)
    return figure


def _left_out(samples: Sequence[Sample]) -> list[str]:
    """What is not in the stack, in words."""
    first = samples[0]
    held = [f"{words} {first.nbytes[key] / 1e6:,.1f} MB" for key, words in IN_TIERS.items() if key in first.nbytes]
    lines = [f"In tiers, not drawn: {'; '.join(held)}."] if held else []
    if _rest(samples):
        lines.append(f"'{OTHER}' is what exceeds its least value in this step.")
    return lines


def _phases(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    """What begins when."""
    names = {"forward": "forward", "backward": "backward", "step": "optimizer step"}
    yield from ((names[sample.event], sample.seconds) for sample in samples if sample.event in names)


def _figure(title: str, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Any, entries: Sequence[tuple[str, str]], columns: int = 0) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=label) for label, color in entries]
    if columns:
        figure.legend(handles=patches, loc="outside right upper", ncols=columns, fontsize=8, frameon=False)
    else:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(entries), fontsize=8, frameon=False)
