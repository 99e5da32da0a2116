"""Train a byte-level GPT on the Python language reference, check that it resumes, and print what the strategy cost.

    python examples/train_gpt.py zero=stage2 trainer.devices=4 batch.micro_batch_size=8 trainer.max_steps=50
    python examples/train_gpt.py zero=stage3 trainer.max_steps=20 compare=[stage1,stage2,ddp]
    python examples/train_gpt.py -m zero=stage1,stage2,stage3
    torchrun --nproc-per-node 2 examples/train_gpt.py zero=stage3

A job starts its own ranks, in new processes (``lightning_zero.launch``), unless ``torchrun`` has started them; a rank
does what ``fit.py`` says. Under ``torchrun`` there is neither a check of resuming nor a comparison, which take new
processes.
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from fit import train
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from report import compare_checkpoints, load, losses, table, verdict
from text import language_reference, unigram_entropy

from lightning_zero.config import TrainingConfig
from lightning_zero.config.hydra import run_with_hints
from lightning_zero.launch import run, run_ranks, started_elsewhere, world_size

SPARE_STEPS = 10  # of a run that only measures: their times, too, go into the median


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """One job: in a rank the training, otherwise the ranks, the checks and the report."""
    complete(cfg.batch, world_size(cfg))
    run(run_rank, run_job, cfg)


def complete(batch: DictConfig, ranks: int) -> None:
    """Of ``train_batch_size``, ``micro_batch_size`` and ``gradient_accumulation_steps``, set what follows."""
    names = ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    try:
        sizes = TrainingConfig(**{name: batch[name] for name in names}).batch(ranks)
    except ValueError as wrong:
        sys.exit(str(wrong))
    batch.update(zip(names, sizes or (), strict=bool(sizes)))


def run_rank(cfg: DictConfig) -> None:
    """The training; where ``torchrun`` has started the ranks, rank 0 reports, too."""
    train(cfg)
    if started_elsewhere() and os.environ["RANK"] == "0":
        report(cfg, {chosen(cfg): load(Path(cfg.output))})


def run_job(cfg: DictConfig) -> None:
    """Start the ranks; then resume, measure other strategies and report, as the configuration asks."""
    folder, choice = Path(cfg.output), chosen(cfg)
    print(f"Plan: {'; '.join(plan(cfg))}.\nFolder: {folder}", flush=True)
    run_ranks([__file__], cfg, folder)
    runs = {choice: load(folder)}
    if cfg.check_resume:
        check_resume(cfg, folder, runs[choice])
    if cfg.compare and "bytes" not in runs[choice]:  # too short a run
        runs[choice] = {**measure(cfg, choice, folder), "losses": runs[choice]["losses"]}
    for name in cfg.compare:
        if name != choice:
            runs[name] = measure(cfg, name, folder)
    report(cfg, runs)


def chosen(cfg: DictConfig) -> str:
    """What trains: the stage, whichever way it was set, or the choice of the group ``zero`` that has none."""
    return f"stage{cfg.zero.stage}" if "stage" in cfg.zero else str(HydraConfig.get().runtime.choices["zero"])


def plan(cfg: DictConfig) -> list[str]:
    """What the job is going to do."""
    epochs, steps = cfg.trainer.max_epochs, cfg.trainer.max_steps
    length = f"at most {steps} steps" if steps > 0 else f"{epochs} epochs"
    parts = [f"train with {chosen(cfg)} for {length}"]
    if cfg.check_resume and steps < 0 and epochs > 1:
        parts.append("train the last epoch again from its checkpoint and compare")
    return parts + [f"measure a few steps of {', '.join(cfg.compare)}"] * bool(cfg.compare)


def measure(cfg: DictConfig, name: str, folder: Path) -> dict[str, Any]:
    """What a few steps of the same model cost under another choice of ``zero``."""
    print(f"\nMeasuring {name} on the same model:", flush=True)
    steps = cfg.measured_steps + SPARE_STEPS
    short = {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "enable_checkpointing": False}
    changes = {"trainer": {**cfg.trainer, **short}, "resume": None, "sample_bytes": 0}
    if name != chosen(cfg):
        changes["zero"] = hydra.compose("config", [f"zero={name}"]).zero
    run_ranks([__file__], cfg, folder / name, **changes)
    return load(folder / name)


def report(cfg: DictConfig, runs: dict[str, dict[str, Any]]) -> None:
    """Print losses, and for all runs that were long enough the table and a line on each comparison."""
    (choice, first), *others = runs.items()
    print(f"\n{losses(first, unigram_entropy(language_reference()))}")
    if "bytes" not in first:
        print(
            f"\nNo table of costs: {choice} made {first['steps']} steps; {first['steps_needed']} are needed"
            f" (measured_steps={cfg.measured_steps})."
        )
        return
    print(f"\n{table(runs)}\n", flush=True)
    for name, other in others:
        print(verdict(choice, first, name, other), flush=True)


def check_resume(cfg: DictConfig, folder: Path, run: dict[str, Any]) -> None:
    """Train the last epoch again, from the checkpoint before it and in new processes, and compare what comes out."""
    checkpoints = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    if len(checkpoints) < 2:
        return
    start, end = checkpoints[-2:]
    print(f"\nResuming from {start.name} in new processes:", flush=True)
    run_ranks([__file__], cfg, folder / "resumed", resume=str(start), sample_bytes=0)
    values = [each["losses"].get("val_loss") for each in (run, load(folder / "resumed"))]
    print(f"\n{end.name} as the first run wrote it and as the resumed run did:")
    print(f"  validation loss: {values[0]} and {values[1]}")
    for line in compare_checkpoints(end, folder / "resumed" / "checkpoints" / end.name):
        print(f"  {line}")


if __name__ == "__main__":
    run_with_hints(main, "config")
