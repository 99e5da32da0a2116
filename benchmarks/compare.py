"""Strategies side by side: the same Trainer, model and data, in new processes for every run, round by round.

    python benchmarks/compare.py --case traffic --precision 32-true --rounds 3 ddp zero1 zero2 zero3 fsdp2 deepspeed3
    python benchmarks/compare.py --case small --steps 3 --rounds 1 ddp zero3

Cases: traffic (101 M parameters, batch 1 x 128), compute (25 M, batch 4 x 128), small (2 M, batch 1 x 32) and tiny
(2,000 parameters of 16 elements). The columns of the table:

  median s, best s   seconds of an optimizer step on rank 0, with a barrier before and after
  ratio, of rounds   median, least and largest over rounds of: time / time of the first strategy in the same round
  sent MB            what the rank that sends most has sent in a step, by the kernel's count of its TCP connections
  peak MB            most resident memory of a rank, over what it was before the model was built
  last loss          of rank 0's last micro-batch

Ranks are processes on the CPU with one thread each. The runs are kept as JSON lines, and drawn if matplotlib is there.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import about
from cases import CASES, STRATEGIES, Settings
from chart import draw
from table import render
from tqdm import tqdm

FOLDER = Path(__file__).parent
TIMEOUT = 3600  # seconds of one run
LINES = 25  # of what a failed run has said


class RunFailed(Exception):
    """A run has ended without a result; the message is the end of what it said."""


def main() -> None:
    options = _parse()
    os.environ["DS_ACCELERATOR"] = "cpu"
    names = [name for name in dict.fromkeys(options.strategies) if _usable(name)]
    if not names:
        sys.exit("no strategy is left to run")
    runs, path = [], _results(options)
    with path.open("a") as file:
        for run in compare(names, _settings(options), options.rounds, options.nvme_path):
            runs.append(run)
            file.write(json.dumps(run) + "\n")
            file.flush()
    if not runs:
        path.unlink()
        sys.exit("no run has ended well")
    print(f"\n{render(runs)}\n\n{path}")
    try:
        draw(runs, path.with_suffix(".png"))
        print(path.with_suffix(".png"))
    except ImportError:
        print("no chart: matplotlib is not installed")
    if {run["strategy"] for run in runs if run["round"] == options.rounds - 1} != set(names):
        sys.exit("some runs have failed: see above")


def compare(names: list[str], settings: Settings, rounds: int, disk: Path | None = None) -> Iterator[dict[str, Any]]:
    """Run each strategy once a round. One that fails is left out from then on, and its error is printed."""
    bar = tqdm(total=rounds * len(names), unit="run", leave=False)
    names, more = list(names), ["deepspeed"] if any(name.startswith("deepspeed") for name in names) else []
    origin = {"machine": about.machine(), "versions": about.versions(*more), "settings": asdict(settings)}
    for number in range(rounds):
        for name in list(names):
            bar.set_description(f"round {number + 1} of {rounds}: {name}")
            date = datetime.now().astimezone().isoformat(timespec="seconds")
            try:
                yield {"strategy": name, "round": number, "date": date, **measure(name, settings, disk), **origin}
            except RunFailed as failed:
                names.remove(name)
                bar.total -= rounds - number - 1
                bar.write(f"{name} has failed:\n{failed}", file=sys.stderr)
            bar.update()
    bar.close()


def measure(name: str, settings: Settings, disk: Path | None = None) -> dict[str, Any]:
    """One run in processes of its own; what it has measured. Nothing stays of what it offloads to ``disk``.

    Raises:
        RunFailed: it has failed, or was stopped because it took too long.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=disk) as swap:
        path = Path(folder) / "result.json"
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(settings.devices)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port for every run
        rank = [str(FOLDER / "run_one.py"), name, settings.to_json(), str(path), swap]
        said = _call([sys.executable, *launcher, *rendezvous, *rank], _environment(settings))
        if not path.exists():
            error = Path(f"{path}.error")
            said = error.read_text() if error.exists() else said
            raise RunFailed("\n".join(said.splitlines()[-LINES:]))
        return json.loads(path.read_text())


def _call(command: list[str], environment: dict[str, str]) -> str:
    """Run to the end, and return what was said."""
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            return process.communicate(timeout=TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher then stops its ranks
            return f"{process.communicate()[0]}\nstopped after {TIMEOUT} seconds"


def _environment(settings: Settings) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if settings.return_memory is not None:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(settings.return_memory)
    return environment


def _usable(name: str) -> bool:
    """Whether what the strategy needs is there; if not, say so."""
    if not name.startswith("deepspeed"):
        return True
    try:
        importlib.import_module("deepspeed")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "deepspeed"
        print(f"{name} is left out: deepspeed {'is not installed' if missing else f'cannot be imported: {error}'}")
        return False
    return True


def _settings(options: argparse.Namespace) -> Settings:
    """The case, with the sizes that the command changes."""
    sizes = {
        key: value if getattr(options, key) is None else getattr(options, key)
        for key, value in asdict(CASES[options.case]).items()
    }
    same = {key: getattr(options, key) for key in ("case", "precision", "accumulate", "steps", "devices")}
    return Settings(**sizes, **same, return_memory=options.return_memory)


def _results(options: argparse.Namespace) -> Path:
    """The file that the runs are written to."""
    options.results.mkdir(parents=True, exist_ok=True)
    return options.results / f"{datetime.now():%Y-%m-%d-%H%M%S}-{options.case}-{options.precision}.jsonl"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("strategies", nargs="+", choices=STRATEGIES, metavar="STRATEGY", help=", ".join(STRATEGIES))
    add("--case", choices=CASES, default="traffic")
    add("--precision", default="32-true", help="the Trainer's (default: %(default)s)")
    add("--accumulate", type=_positive, default=1, help="micro-batches a step (default: %(default)s)")
    add("--steps", type=_positive, default=8, help="measured steps of a run, after two others (default: %(default)s)")
    add("--rounds", type=_positive, default=3, help="runs of each strategy (default: %(default)s)")
    add("--devices", type=_positive, default=2, help="ranks (default: %(default)s)")
    for size in ("dim", "layers", "batch", "seq"):
        add(f"--{size}", type=_positive, help="instead of the case's")
    add(
        "--return-memory",
        type=_positive,
        metavar="BYTES",
        help="malloc gives freed blocks of this size and more back"
        " to the system (MALLOC_MMAP_THRESHOLD_): slower, but resident memory is what is in use",
    )
    add("--nvme-path", type=Path, metavar="FOLDER", help="where to offload to (default: the temporary one)")
    add("--results", type=Path, default=FOLDER / "results", metavar="FOLDER", help="for JSON lines and the chart")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


if __name__ == "__main__":
    main()
