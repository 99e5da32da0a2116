"""The examples run as their users run them: as scripts, in processes of their own."""

import json
import math
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import forked
import pytest
from forked import TORCHRUN
from harness import environment
from hydra import compose, initialize_config_dir
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_zero import launch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, CONF = ROOT / "examples", ROOT / "conf"
GROUPS = sorted(CONF.glob("*/*.yaml"))
APPS = {"examples/train_gpt.py": "config", "-m lightning_zero.train": "train"}
TINY = [
    *("model.dim=32", "model.depth=2", "model.num_heads=1", "batch.sequence_length=32", "sample_bytes=10"),
    "sample_after=10",
    *("trainer.limit_train_batches=16", "trainer.limit_val_batches=1", "trainer.max_epochs=2", "measured_steps=3"),
]

sys.path.insert(0, str(EXAMPLES))
import bigger_than_memory  # noqa: E402
import report  # noqa: E402
from one_batch import Run  # noqa: E402
from text import language_reference, unigram_entropy  # noqa: E402


def start(script, *arguments, cwd):
    """Start a script of examples/, or what an option of Python names, with one thread a rank.

    ``lightning_zero`` is found in the checkout.
    """
    command = [sys.executable, script if script.startswith("-") else str(EXAMPLES / script), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(ROOT), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(script, *arguments, cwd):
    """Run to the end; what was printed, and the exit code."""
    process = start(script, *arguments, cwd=cwd)
    output, _ = process.communicate(timeout=120)
    return output, process.returncode


def run_forked(script, *arguments, cwd):
    """The same without a new Python; one test of a kind does with one."""
    return forked.run(str(EXAMPLES / script), *arguments, cwd=cwd)


def processes_about(folder):
    """Processes whose command line names ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue  # it has ended
        if str(folder).encode() in words:
            found.append(path.parent.name)
    return found


def test_minimal_example_learns(tmp_path):
    output, code = run("minimal.py", cwd=tmp_path)
    assert code == 0, output
    assert float(output.rpartition(":")[2]) < 0.1


def test_training_resumes_to_the_bit_and_reports_its_costs(tmp_path):
    settings = ["zero=stage2", "trainer.devices=2", "batch.micro_batch_size=2", "compare=[ddp]"]
    output, code = run_forked("train_gpt.py", *settings, *TINY, f"hydra.run.dir={tmp_path / 'job'}", cwd=tmp_path)
    assert code == 0, output
    assert output.count("equal to the bit") == 2, output
    assert "unigram entropy of the text" in output and "A sample:" in output
    assert "stage2 holds" in output.splitlines()[-1] and "ddp's" in output.splitlines()[-1]
    rows = {line[:16].strip(): line[16:].split() for line in output.splitlines() if line[:1].isalpha()}
    assert "2Y + 16Y/N" in " ".join(rows["sum of these"]) and "16Y" in rows["sum of these"]
    assert all(int(rows[row][0].replace(",", "")) > 0 for row in ("elements sent", "bytes sent"))


@pytest.mark.full
def test_every_job_of_a_sweep_ends_in_a_folder_of_its_own(tmp_path):
    arguments = ["-m", "zero.stage=1,3", "trainer.max_steps=4", "check_resume=false", *TINY]
    output, code = run_forked("train_gpt.py", *arguments, f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert code == 0, output
    for job, stage in (("0", "stage1"), ("1", "stage3")):
        assert (tmp_path / "sweep" / job / "costs.json").exists()
        assert f"train with {stage}" in output and f"{stage} made 4 steps" in output, output
    assert output.count("made 4 steps; 6 are needed") == 2 and "A sample" not in output, output


@pytest.mark.full
def test_a_strategy_whose_run_is_too_short_is_measured_apart(tmp_path):
    short = ["trainer.devices=1", "trainer.max_steps=4", "compare=[stage3]", f"hydra.run.dir={tmp_path / 'job'}"]
    output, code = run_forked("train_gpt.py", "zero=stage3", *TINY, *short, cwd=tmp_path)
    assert code == 0, output
    assert "Measuring stage3" in output and "sum of these" in output, output


def test_ranks_of_torchrun_report_once(tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(EXAMPLES / "train_gpt.py"), "trainer.max_steps=6"]
    output, code = forked.run(*command, *TINY, f"hydra.run.dir={tmp_path / 'job'}", cwd=tmp_path)
    assert code == 0, output
    assert output.count("sum of these") == 1, output


def test_interrupt_ends_all_ranks(tmp_path):
    endless = ["trainer.max_epochs=100000", *TINY[:-2], f"hydra.run.dir={tmp_path / 'job'}"]
    process = start("train_gpt.py", "zero=stage3", *endless, cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("epoch 0"):
            break
    assert len(processes_about(tmp_path)) == 3
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, output
    end = time.monotonic() + 10
    while processes_about(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes_about(tmp_path)


def test_a_rank_that_fails_fails_the_job(tmp_path):
    wrong = ["optimizer.lr=-1", "trainer.devices=1", f"hydra.run.dir={tmp_path / 'job'}"]
    output, code = run_forked("train_gpt.py", *wrong, *TINY, cwd=tmp_path)
    assert code == 1
    assert "Invalid learning rate: -1" in output.splitlines()[-1], output
    assert "Traceback" not in output and "Error executing job" not in output, output


def test_the_failure_that_is_shown_is_the_cause_of_the_others(tmp_path):
    words = ["", "PeerError: rank 2 has failed: ValueError: wrong", "ValueError: wrong"]
    for rank, message in enumerate(words):
        extra = {"py_callstack": f"all of {message}", "timestamp": "0" if rank == 1 else "1"}
        (tmp_path / f"{rank}.json").write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    stopped = ProcessFailure(0, 1, -signal.SIGTERM, "no file")
    failures = {0: stopped, **{rank: ProcessFailure(rank, 1, 1, str(tmp_path / f"{rank}.json")) for rank in (1, 2)}}
    shown = launch._cause(ChildFailedError("job", failures), tmp_path)
    assert shown.startswith("Rank 2 failed") and shown.endswith("\nValueError: wrong")
    assert (tmp_path / "error.txt").read_text() == "all of ValueError: wrong"


LIMIT = ["--memory", "650MB", "--width", "384", "--length", "32", "--steps", "2"]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="the bound is on resident memory as Linux counts it: macOS leaves out compressed pages",
)
def test_a_model_that_does_not_fit_is_trained_from_the_disk(tmp_path):
    """16 bytes for each of its parameters are more than the limit, and with all that is imported it stays below."""
    output, code = run("bigger_than_memory.py", *LIMIT, "--layers", "2", "--factor", "11", cwd=tmp_path)
    assert code == 0, output
    rows = {line[:16].strip(): line[16:].split() for line in output.splitlines()}
    small, large = (1e6 * float(word) for word in rows["parameters"] if word != "M")
    assert large >= 11 * small and 16 * large > 650e6, output
    assert 0.3 < float(rows["peak memory"][2]) <= 0.65, output
    assert float(rows["on disk"][2]) == pytest.approx(16 * large / 1e9, abs=0.02), output
    assert float(rows["loss of step 2"][1]) < float(rows["loss of step 1"][1]), output
    assert not [*tmp_path.iterdir()]


def test_too_small_a_limit_is_said(tmp_path):
    output, code = run("bigger_than_memory.py", *LIMIT, "--memory", "150MB", cwd=tmp_path)
    assert code == 1
    assert output.splitlines()[-1].startswith("A plain model of 1 layers does not fit"), output


def measured(layers, peak=0, losses=(2.0, 1.0)):
    """A training of layers with a million parameters."""
    return Run(layers, layers * 10**6, 10**6, peak, 0, list(losses), [1.0, 1.0])


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 12])
def test_the_largest_model_that_fits_is_found(most):
    """The guess is 8. What is far too large is killed, what is a little too large says so."""
    options, tried = Namespace(memory=100 + 7 * 16 * 10**6, layers=None), []

    def train(layers):
        tried.append(layers)
        return None if layers > most + 1 else measured(layers, peak=100 if layers <= most else options.memory + 1)

    assert bigger_than_memory.largest(train, options).layers == most
    assert most + 1 in tried and len(tried) == len(set(tried)), tried


@pytest.mark.parametrize(
    ("large", "says"),
    [
        (measured(10, peak=200), "is above 0.00 GB"),
        (measured(10, losses=(2.0, 2.0)), "did not fall: 2.0000 at first, 2.0000 at last"),
        (measured(10, losses=(2.0, math.nan)), "did not fall"),
    ],
)
def test_a_limit_that_was_passed_and_a_loss_that_did_not_fall_are_errors(large, says):
    with pytest.raises(SystemExit, match=says):
        bigger_than_memory.judge(measured(1), large, Namespace(memory=100))


def test_entropy_of_a_text():
    assert unigram_entropy(b"aabb") == pytest.approx(math.log(2))
    assert 3.0 < unigram_entropy(language_reference()) < 3.5


@pytest.mark.parametrize(
    ("stage", "accumulate", "whole", "shared"),
    [(None, 2, 16, 0), (0, 2, 18, 0), (1, 1, 2, 16), (1, 2, 6, 12), (2, 1, 2, 16), (2, 2, 2, 16), (3, 1, 0, 16)],
)
def test_formulas_are_those_of_the_paper(stage, accumulate, whole, shared):
    pairs = report.bytes_per_parameter(stage, accumulate, "bf16-mixed").values()
    assert tuple(map(sum, zip(*pairs, strict=True))) == (whole, shared)


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_a_group_composes_and_its_header_says_how_to_use_it(path):
    choice = f"{path.parent.name}={path.stem}"
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    commands = [line.removeprefix("#").split() for line in header if line.startswith("#   python")]
    assert any(choice in command for command in commands), f"the header of {path} has no command with {choice}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for _, *program, in_app in map(split_command, commands):
            compose(APPS[" ".join(program)], in_app)


def split_command(words):
    """``python``, the program and a list of its arguments."""
    end = 3 if words[1] == "-m" else 2
    return [*words[:end], words[end:]]


def test_readme_names_every_file():
    readme = (ROOT / "README.md").read_text()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True).stdout.split()
    missing = [name for name in listed if Path(name).name not in readme and Path(name).name != "__init__.py"]
    assert not missing, f"README.md does not mention {missing}"
