"""Train a byte-level GPT on the Python language reference, check that it resumes, and print what the strategy cost.

    python examples/train_gpt.py zero=stage2 trainer.devices=4 batch.micro_batch_size=8 trainer.max_steps=50
    python examples/train_gpt.py -m zero=stage1,stage2,stage3
    torchrun --nproc-per-node 2 examples/train_gpt.py zero=stage3

A job starts its own ranks, in new processes (``launch.py``), unless ``torchrun`` has started them; a rank does what
``fit.py`` says.
"""

import os
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from launch import run_ranks
from omegaconf import DictConfig
from report import compare_checkpoints, load_ranks, table
from text import language_reference, unigram_entropy


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """One job: in a rank the training, otherwise the ranks, the checks and the report."""
    if "LOCAL_RANK" in os.environ:
        from fit import train  # only the ranks need Lightning, which takes seconds to import

        train(cfg)
    else:
        run_job(cfg)


def run_job(cfg: DictConfig) -> None:
    """Start the ranks; then resume, measure other strategies and report, as the configuration asks."""
    folder, choice = Path(cfg.output), HydraConfig.get().runtime.choices["zero"]
    entropy = unigram_entropy(language_reference())
    print(f"{choice}: training in {folder}", flush=True)
    run_ranks(__file__, cfg, folder)
    runs = {choice: load_ranks(folder)}
    if cfg.check_resume:
        check_resume(cfg, folder, runs[choice])
    for other in cfg.compare:
        print(f"\nMeasuring {other} on the same model:", flush=True)
        short = {"max_steps": cfg.measured_steps + 10, "limit_val_batches": 0, "enable_checkpointing": False}
        changes = {"zero": hydra.compose("config", [f"zero={other}"]).zero, "trainer": {**cfg.trainer, **short}}
        run_ranks(__file__, cfg, folder / other, **changes, resume=None, sample_bytes=0)
        runs[other] = load_ranks(folder / other)
    losses = "".join(f"{key} {value:.4f}, " for key, value in runs[choice]["losses"].items() if key != "train_loss")
    print(f"\n{losses}unigram entropy of the text {entropy:.4f} nats per byte")
    measured = {name: run for name, run in runs.items() if "bytes" in run}
    print(f"\n{table(measured)}" if measured else "No table: too few steps were made.", flush=True)


def check_resume(cfg: DictConfig, folder: Path, run: dict[str, Any]) -> None:
    """Train the last epoch again, from the checkpoint before it and in new processes, and compare what comes out."""
    checkpoints = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    if len(checkpoints) < 2:
        print("\nThe check of resuming needs two epochs; there was one.")
        return
    start, end = checkpoints[-2:]
    print(f"\nResuming from {start.name} in new processes:", flush=True)
    run_ranks(__file__, cfg, folder / "resumed", resume=str(start), sample_bytes=0)
    losses = [each["losses"].get("val_loss") for each in (run, load_ranks(folder / "resumed"))]
    print(f"\n{end.name} as the first run wrote it and as the resumed run did:")
    print(f"  validation loss: {losses[0]} and {losses[1]}")
    for line in compare_checkpoints(end, folder / "resumed" / "checkpoints" / end.name):
        print(f"  {line}")


if __name__ == "__main__":
    main()
