"""The closing table of a run, and the comparison of two checkpoints.

The rows of the table, each the largest of all ranks; memory is taken when the last gradient of a step is in:

- units in use: whole parameters that are gathered at that moment (stages 0, 1 and 2: all), in the dtype of the forward.
  Under bf16-mixed, norms and embeddings are fp32 there: more than the formula's 2 bytes.
- parameters: what a rank keeps of them: all under ddp, its part of the fp32 master weights under ZeRO. At stages 1 and
  2, weights that are fp32 in the forward are their own masters, so they are in the row above: less than the formula's.
- free buffers: memory that the engine keeps for its next gathering or reduction.
- peak: all of these at the start of a step, and the most that malloc (on GPUs, torch) gives out on top until it ends.
- elements sent: the engine's count; for ddp, which sends fp32, bytes / 4. At stage 3 the formula is a bound: units that
  are still gathered when they are needed again are not sent again.
- bytes sent: the kernel's count for the rank's TCP connections; NCCL's traffic is not among them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

MIB = 2**20
STATES = {"units": "units in use", "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
NOTE = """\
N = {ranks} ranks, Y = {params:,} parameters, {accumulate} micro-batches a step, {precision}, Adam. Of all ranks the
largest; memory is taken when a step's last gradient is in. Weights that are fp32 in the forward (norms, embeddings) are
their own masters at stages 1 and 2: more units and fewer parameters than the formulas say. On a shared CPU, times are
noisy. What every row is: examples/report.py."""


def load(folder: Path) -> dict[str, Any]:
    """What a job has measured."""
    return json.loads((folder / "costs.json").read_text())


def losses(run: dict[str, Any], entropy: float) -> str:
    """The losses of a run, beside that of the best predictor that knows the frequencies of bytes alone."""
    words = [f"{key} {value:.4f}" for key, value in run["losses"].items() if key != "train_loss"]
    return f"{', '.join(words)} (nats per byte; to be beaten: {entropy:.4f}, the unigram entropy of the text)"


def bytes_per_parameter(stage: int | None, accumulate: int, precision: str) -> dict[str, tuple[int, int]]:
    """Bytes of each of Adam's model states: those that every rank holds, and those that the ranks share.

    ``stage`` None is ``ddp``. Under bf16 and fp16, whole parameters take 2 bytes beside the fp32 master; in fp32 the
    master is a part of them. Stage 1 sums the gradients of several micro-batches whole.
    """
    if stage is None:
        return {"units": (0, 0), "parameters": (4, 0), "gradients": (4, 0), "optimizer": (8, 0)}
    mixed = precision.startswith(("bf16", "16"))
    shared = {
        "units": (0 if stage == 3 else 2 if mixed else 4, 0),
        "parameters": (0, 4 if mixed or stage == 3 else 0),
        "gradients": (4, 0) if stage < 2 and accumulate > 1 else (0, 4),
        "optimizer": (0, 8),
    }
    return shared if stage else {key: (sum(pair), 0) for key, pair in shared.items()}


def table(runs: dict[str, dict[str, Any]]) -> str:
    """One column of measurements and one of the ZeRO paper's formulas for every run, and what the rows mean."""
    labels = [*STATES.values(), "sum of these", "free buffers", "peak", "elements sent", "bytes sent", "step"]
    columns = [["", *labels]]
    for name, run in runs.items():
        columns += [[name, *_measured(run)], ["formula", *_formulas(run)]]
    widths = [max(map(len, column)) for column in columns]
    columns = [[column[0], "-" * width, *column[1:]] for column, width in zip(columns, widths, strict=True)]
    rows = zip(*columns, strict=True)
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([*lines, "", NOTE.format(**next(iter(runs.values())))])


def verdict(name: str, run: dict[str, Any], other_name: str, other: dict[str, Any]) -> str:
    """What ``run`` costs beside ``other``, in one line."""
    mine, theirs = (sum(_states(each).values()) / MIB for each in (run, other))
    ratio = f"{theirs / mine:.1f}x less" if mine < theirs else f"{mine / theirs:.1f}x as much"
    words = [f"{name} holds {mine:.1f} MiB of states a rank, {other_name} {theirs:.1f}: {ratio}"]
    if run["bytes"] and other["bytes"]:
        words.append(f"it sends {run['bytes'] / other['bytes']:.2f}x the bytes")
    times = [f"{1000 * each['step_seconds']:.0f} ms" for each in (run, other)]
    words.append(f"its step takes {times[0]}, {other_name}'s {times[1]}")
    return f"{'; '.join(words)}."


def _states(run: dict[str, Any]) -> dict[str, int]:
    """Bytes of what a rank holds, in the order of the table."""
    memory = run["memory"]
    if run["stage"] is not None:
        memory = {**memory, "units": memory["parameters"], "parameters": memory["master"]}
    return {key: memory.get(key, 0) for key in STATES}


def _measured(run: dict[str, Any]) -> Iterator[str]:
    sizes = [*_states(run).values()]
    yield from map(_mib, [*sizes, sum(sizes), run["memory"].get("buffers", 0), run["peak"]])
    yield _count(run["bytes"] / 4 if run["stage"] is None else run["elements"])
    yield _count(run["bytes"])
    yield f"{1000 * run['step_seconds']:.0f} ms"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number else "-"  # not counted, or a single rank


def _formulas(run: dict[str, Any]) -> Iterator[str]:
    stage, params, ranks, accumulate = (run[key] for key in ("stage", "params", "ranks", "accumulate"))
    pairs = [*bytes_per_parameter(stage, accumulate, run["precision"]).values()]
    for whole, shared in [*pairs, tuple(map(sum, zip(*pairs, strict=True)))]:
        terms = [f"{whole}Y"] * (whole > 0) + [f"{shared}Y/N"] * (shared > 0)
        yield f"{' + '.join(terms)} = {_mib((whole + shared / ranks) * params)}" if terms else "0"
    yield from ("", "")
    sent = (2, 2, accumulate + 1, 3 * accumulate)[stage or 0]
    sign = "<=" if stage == 3 else "="
    yield f"{sent}Y(N-1)/N {sign} {sent * params * (ranks - 1) / ranks:,.0f}"
    yield from ("", "")


def _mib(size: float) -> str:
    return f"{size / MIB:.2f} MiB"


def compare_checkpoints(one: Path, other: Path) -> Iterator[str]:
    """For weights and for optimizer state: whether two files hold the same, and how far they are apart if not."""
    files = [torch.load(path, map_location="cpu", weights_only=True) for path in (one, other)]
    for label, key in (("weights", "state_dict"), ("optimizer state", "optimizer_states")):
        mine, theirs = (_tensors(file[key]) for file in files)
        if [t.shape for t in mine] != [t.shape for t in theirs]:
            yield f"{label}: not the same tensors"
        elif all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            yield f"{label}: {len(mine)} tensors, equal to the bit"
        else:
            apart = max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))
            yield f"{label}: {len(mine)} tensors, the largest difference is {apart:.3g}"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
