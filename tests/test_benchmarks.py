"""The benchmarks: the smallest comparison runs, and the table says what the runs have measured."""

import subprocess
import sys
from pathlib import Path

import forked
import pytest
from harness import environment

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
import compare  # noqa: E402
import table  # noqa: E402


def run_of(strategy, number, seconds, **changes):
    """A run as compare.py writes it."""
    settings = {"case": "small", "dim": 8, "layers": 1, "batch": 1, "seq": 4, "precision": "32-true", "accumulate": 1}
    settings |= {"steps": len(seconds), "devices": 2, "return_memory": None}
    origin = {"machine": {"cpu": "a CPU", "cores": 2}, "versions": {"torch": "2", "commit": None}, "date": "today"}
    run = {"strategy": strategy, "round": number, "seconds": seconds, "settings": settings, **origin}
    return run | {"parameters": 2_000_000, "sent": 1_500_000, "peak": 3_000_000, "loss": 0.5} | changes


def test_ratios_are_taken_within_rounds():
    """The second round is ten times slower, for both."""
    runs = [run_of("ddp", 0, [1.0, 2.0, 3.0]), run_of("zero3", 0, [2.0, 3.0, 9.0])]
    runs += [run_of("ddp", 1, [20.0]), run_of("zero3", 1, [50.0], peak=4_000_000, loss=0.25)]
    ddp, zero3 = table.summarize(runs)
    assert (ddp["ratio"], ddp["median"], ddp["best"]) == (1, 11, 1)
    assert (zero3["ratio"], zero3["median"], zero3["best"]) == (2, 26.5, 2)
    assert zero3["ratios"] == (1.5, 2.5)
    *heading, columns, first, second = table.render(runs).splitlines()
    assert "2 ranks, 2.000 M parameters" in heading[0] and "a CPU, 2 cores; torch 2; today" in heading[2]
    assert columns.split()[0] == "strategy" and len(columns) == len(first) == len(second)
    assert second.split() == ["zero3", "26.5000", "2.0000", "2.000", "1.50-2.50", "1.5", "4.0", "0.25000"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory and traffic are read from Linux' /proc")
def test_smallest_comparison_runs(tmp_path, monkeypatch, capsys):
    """Here, and its runs in forks."""

    def call(command, environment):
        python, *words = command
        assert python == sys.executable
        return forked.run(*words, cwd=tmp_path, **environment)[0]

    sizes = ["--case", "small", "--dim", "16", "--layers", "1", "--steps", "2", "--rounds", "1"]
    monkeypatch.setattr(compare, "_call", call)
    monkeypatch.setattr(sys, "argv", ["compare.py", *sizes, "--results", str(tmp_path), "ddp", "zero3"])
    monkeypatch.setenv("DS_ACCELERATOR", "")  # it is set, and is to be gone afterwards
    compare.main()
    said = capsys.readouterr().out
    (results,) = tmp_path.glob("*-small-32-true.jsonl")
    ddp, zero3 = runs = table.load(results)
    assert table.render(runs) in said
    assert (tmp_path / f"{results.stem}.png").exists() or "no chart: matplotlib is not installed" in said
    assert len(ddp["seconds"]) == 2 and ddp["loss"] == pytest.approx(zero3["loss"])
    sent = 4 * ddp["parameters"]  # 2Y (N-1)/N in fp32
    assert sent <= ddp["sent"] < sent + 4096 and zero3["sent"] < 1.5 * sent + 8192


@pytest.mark.skipif(sys.platform != "linux", reason="it goes past the page cache by O_DIRECT, which Linux has")
def test_the_disk_is_measured(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "disk.py"), str(tmp_path), "--parameters", "2e6", "--rounds", "1"]
    done = subprocess.run(command, env=environment(ROOT), text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = dict(line.rsplit("  ", 1) for line in done.stdout.splitlines() if "GB/s" in line)
    assert len(rows) == 3 and all(float(rate.split()[0]) > 0 for rate in rows.values()), done.stdout
    assert "against the raw one: " in done.stdout and not list(tmp_path.iterdir())
