"""The closing table of a run, and the comparison of two checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

STATES = {"units": "units in use", "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
NOTE = """\
N = {ranks} ranks, Y = {params:,} parameters, {accumulate} micro-batches a step, {precision}, Adam. Of all ranks the
largest; memory is taken when the last gradient of a step is in.
  units in use     whole parameters that are gathered at this moment (stages 1 and 2: all) in the dtype of the forward:
                   under bf16-mixed, norms and embeddings are fp32, which the formula leaves out
  parameters       what a rank keeps of them: all under ddp, its part of the fp32 master weights under ZeRO
  free buffers     memory that the engine keeps for its next gathering or reduction
  peak             all of these at the start of a step, and the most that malloc gives out on top of them until it ends
  elements sent    by a rank in a step: the engine's count; for ddp, which sends fp32, bytes / 4. At stage 3 the formula
                   is a bound: units still gathered when they are needed again are not sent again
  bytes sent       the kernel's count for the rank's TCP connections"""


def load_ranks(folder: Path) -> dict[str, Any]:
    """What the ranks of a job measured, merged: of every number the largest."""
    return _largest([json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))])


def _largest(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _largest([value[key] for value in values]) for key in values[0]}
    return max(values) if isinstance(values[0], int | float) else values[0]


def bytes_per_parameter(stage: int | None, accumulate: int, precision: str) -> dict[str, tuple[int, int]]:
    """Bytes of each of Adam's model states: those that every rank holds, and those that the ranks share.

    ``stage`` None is ``ddp``. Under bf16-mixed, whole parameters take 2 bytes beside the fp32 master; in fp32 the
    master is a part of them. Stage 1 sums the gradients of several micro-batches whole.
    """
    if stage is None:
        return {"units": (0, 0), "parameters": (4, 0), "gradients": (4, 0), "optimizer": (8, 0)}
    mixed = precision.startswith("bf16")
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


def _measured(run: dict[str, Any]) -> Iterator[str]:
    memory = run["memory"]
    if run["stage"] is not None:
        memory = {**memory, "units": memory["parameters"], "parameters": memory["master"]}
    sizes = [memory.get(key, 0) for key in STATES]
    yield from map(_mib, [*sizes, sum(sizes), memory.get("buffers", 0), run["peak"]])
    yield f"{run['bytes'] / 4 if run['stage'] is None else run['elements']:,.0f}"
    yield f"{run['bytes']:,.0f}"
    yield f"{1000 * run['step_seconds']:.0f} ms"


def _formulas(run: dict[str, Any]) -> Iterator[str]:
    stage, params, ranks, accumulate = (run[key] for key in ("stage", "params", "ranks", "accumulate"))
    pairs = [*bytes_per_parameter(stage, accumulate, run["precision"]).values()]
    for whole, shared in [*pairs, tuple(map(sum, zip(*pairs, strict=True)))]:
        terms = [f"{whole}Y"] * (whole > 0) + [f"{shared}Y/N"] * (shared > 0)
        yield f"{' + '.join(terms)} = {_mib((whole + shared / ranks) * params)}" if terms else "0"
    yield from ("", "")
    sent = (2, 2, accumulate + 1, 3 * accumulate)[stage or 0]
    yield f"{sent}Y(N-1)/N = {sent * params * (ranks - 1) / ranks:,.0f}"
    yield from ("", "")


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


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
