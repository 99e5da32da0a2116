"""What is seen of a step: the timeline, the picture of memory, and the labels in a profile."""

import json
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from harness import distributed
from oracles import adamw, build_engine, communicator, engine_step
from test_memory import needs_mallinfo
from test_order import BLOCKS, Deep
from test_strategy import Net, loader, trainer, zero

from lightning_zero import OffloadConfig, ZeroMonitor
from lightning_zero.report import pictures
from lightning_zero.report.memory import MemorySamples, Sample, total_bytes
from lightning_zero.report.timeline import Span, Timeline

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
FILES = ["memory.png", "timeline.png", "trace.json"]
PHASES = ["forward", "backward", "optimizer step"]


def report(rank, world_size, folder, stage, accumulate=1, monitor=None, model=None, **settings):
    """Trains five steps, and returns the events of the trace, of all ranks, that are no labels."""
    monitor = monitor or ZeroMonitor(report=folder / "report")
    options = {"callbacks": [monitor], "accumulate_grad_batches": accumulate, "max_steps": 5, "max_epochs": -1}
    trainer(rank, world_size, folder, zero(stage, **settings), **options).fit(model or Net(), loader())
    torch.distributed.barrier()
    trace = json.loads((folder / "report" / "trace.json").read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def times(events, row, rank=0):
    """How often each name occurs in a row."""
    return Counter(event["name"] for event in events if event["cat"] == row and event["pid"] == rank)


def assert_nested(spans):
    """Spans, as pairs of begin and end and in order, lie within one another or apart."""
    around = []
    for begin, end in spans:
        assert begin <= end
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], f"{begin} to {end} ends after {around[-1]}"
        around.append(end)


@pytest.fixture
def no_pictures(monkeypatch):
    """As if matplotlib were installed, and drew nothing."""
    monkeypatch.setattr(pictures, "check", lambda: None)
    monkeypatch.setattr(pictures, "timeline_figure", lambda spans, title: None)
    monkeypatch.setattr(pictures, "memory_figure", lambda samples, title: None)
    monkeypatch.setattr(pictures, "save", lambda figure, path: path.write_text("a picture"))


BLOCKS_OF_NET = [f"blocks.{i}" for i in range(3)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@distributed(world_size=2)
def test_a_trace_has_all_units_of_all_ranks(rank, world_size, stage, accumulate, tmp_path, no_pictures):
    events = report(rank, world_size, tmp_path, stage, accumulate)
    units = [*BLOCKS_OF_NET, "(root)"]
    for other in range(world_size):
        passes = times(events, "phase", other)
        assert passes == {"forward": accumulate, "backward": accumulate, "optimizer step": 1}
        blocks = times(events, "unit", other)
        assert blocks == {
            **{f"forward {unit}": accumulate for unit in BLOCKS_OF_NET},
            **{f"backward {unit}": accumulate for unit in units},
        }
        reductions = {2: accumulate, 3: accumulate}.get(stage, 1)
        assert {name: n for name, n in times(events, "engine", other).items() if "reduce" in name} == {
            f"launch reduce {unit}": reductions for unit in units
        }
        assert {name: n for name, n in times(events, "reduce", other).items() if name.startswith("reduce ")} == {
            f"reduce {unit}": reductions for unit in units
        }
        gathers = {name: n for name, n in times(events, "gather", other).items() if name.startswith("gather ")}
        if stage == 3:  # the last block and the root stay until the backward
            kept = {"gather blocks.2": accumulate, "gather (root)": accumulate}
            assert gathers == {**{f"gather {unit}": 2 * accumulate for unit in BLOCKS_OF_NET[:2]}, **kept}
        elif stage:
            assert gathers.keys() == {f"gather {unit}" for unit in units}
        else:
            assert not gathers


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_spans_of_a_thread_lie_within_one_another(rank, world_size, stage, tmp_path, no_pictures):
    events = report(rank, world_size, tmp_path, stage, accumulate=2)
    threads = {(event["pid"], event["tid"]) for event in events}
    assert len(threads) == world_size * 4  # computation, gathers, reductions, control
    for thread in threads:
        own = [event for event in events if (event["pid"], event["tid"]) == thread]
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)
        # to a nanosecond: duration and begin are rounded apart
        assert_nested([(round(e["ts"], 3), round(e["ts"] + e["dur"], 3)) for e in own])
    assert min(event["ts"] for event in events) >= 0


@distributed(world_size=2)
def test_units_run_within_their_pass(rank, world_size, tmp_path, no_pictures):
    events = [event for event in report(rank, world_size, tmp_path, 3) if event["pid"] == 0]
    phases = {event["name"]: event for event in events if event["cat"] == "phase"}
    assert [phase for phase in phases if phase in PHASES] == PHASES
    for event in events:
        if event["cat"] == "unit":
            around = phases[event["name"].split()[0]]
            assert around["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= around["ts"] + around["dur"] + 1e-3
    backwards = [event["name"].split()[1] for event in events if event["name"].startswith("backward ")]
    assert backwards == ["blocks.2", "blocks.1", "blocks.0", "(root)"]


@distributed(world_size=2)
def test_reads_and_writes_of_a_tier_are_seen(rank, world_size, tmp_path, no_pictures):
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    events = report(rank, world_size, tmp_path, 3, offload_optimizer=disk, offload_params=disk)
    reads, writes = ([e for e in events if e["cat"] == row and e["pid"] == 0] for row in ("read", "write"))
    for unit in [*BLOCKS_OF_NET, "(root)"]:
        read = {event["name"] for event in reads if event["args"]["unit"] == unit}
        assert {f"parameters of {unit}", f"exp_avg of {unit}", f"exp_avg_sq of {unit}"} <= read
        written = {event["name"]: event for event in writes if event["args"]["unit"] == unit}
        assert {f"parameters of {unit}", f"exp_avg of {unit}", f"exp_avg_sq of {unit}"} <= written.keys()
    block = next(event for event in writes if event["name"] == "exp_avg of blocks.0")
    assert block["args"]["bytes"] == 4 * 64  # of a weight of 8 x 8 and a bias, padded to 128, a half


class Clock:
    """Says that it is 0, 1, 2 ..."""

    def __init__(self):
        self.now = -1

    def perf_counter(self):
        self.now += 1
        return self.now

    def time(self):
        return 0


@distributed(world_size=1)
def test_a_backward_begins_when_its_gradient_is_there(rank, world_size, monkeypatch):
    """And not before the one before it has ended; that of a unit without such a moment begins then."""
    with communicator() as comm:
        engine = build_engine(Deep(), comm, stage=1)
        timeline = Timeline(engine)
        monkeypatch.setattr("lightning_zero.report.timeline.time", Clock())
        told = "backward, backward b, backward a, backward_done b, reduce b, reduce_done b, backward_done a"
        for words in [*told.split(", "), "backward_done (root)", "backward_done"]:
            timeline.append((*words.split(), "")[:2])
        spans = [(span.name, span.begin, span.end) for span in timeline._passes(end=100)]
        engine.release(whole=True)
    assert spans == [
        ("backward b", 1, 3),
        ("launch reduce b", 4, 5),
        ("backward a", 3, 6),
        ("backward (root)", 6, 7),
        ("backward", 0, 8),
    ]


class UnderWay:
    """A transfer that ends later."""

    def __init__(self, what):
        self.what, self.ended = what, None


@distributed(world_size=1)
def test_transfers_under_way_follow_one_another(rank, world_size):
    """In the order of their ends, each once the one before has ended; what does not end ends with the step."""
    with communicator() as comm:
        engine = build_engine(Deep(), comm, stage=1)
        timeline = Timeline(engine)
        timeline._epoch = 0.0
        handles = [UnderWay(f"gather of {unit}") for unit in BLOCKS]
        for handle in handles:
            timeline._collective("gather", handle)
        begin, last = timeline._transfers[0].begin, timeline._transfers[-1].begin
        handles[0].ended, handles[1].ended = last + 1, last + 3
        spans = timeline.spans(begin, last + 4)
        engine.release(whole=True)
    assert [span.name for span in spans] == [f"gather {unit}" for unit in BLOCKS]
    assert [span.begin for span in spans] == [begin, last + 1, last + 3, last + 4, last + 4]
    assert [span.end for span in spans] == [last + 1, last + 3, last + 4, last + 4, last + 4]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_samples_are_what_the_engine_says(rank, world_size, stage):
    with communicator() as comm:
        model = Deep()
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        engine_step(engine, model, optimizer, comm, 0)
        samples = MemorySamples(engine)
        samples.open()
        before = engine.memory()
        engine_step(engine, model, optimizer, comm, 1)
        after = engine.memory()
        samples.close()
        engine_step(engine, model, optimizer, comm, 2)
        engine.release(whole=True)
    found = samples.samples
    assert {key: found[0].nbytes[key] for key in before} == before
    assert {key: found[-1].nbytes[key] for key in after} == after
    assert [sample.event for sample in found][:1] == ["begin"] and found[-1].event == "end"
    assert all(one.seconds <= other.seconds for one, other in pairwise(found))
    # while a reduction is under way this rank's gradients of the unit, and at two ranks a half of it that is received
    block = 4 * sum(flat.layout.numel for flat in engine.units[-1].flats)
    most = max(sample.nbytes["reducing"] for sample in found)
    assert most >= 1.5 * block and found[-1].nbytes["reducing"] == 0
    whole = [sample.nbytes["parameters"] for sample in found]
    assert (min(whole) < max(whole)) == (stage == 3)


@needs_mallinfo
def test_what_is_allocated_is_counted():
    before = total_bytes(torch.device("cpu"))
    something = torch.empty(10**8, dtype=torch.uint8)
    after = total_bytes(torch.device("cpu"))
    assert 10**8 <= after - before < 10**8 + 10**6
    del something
    assert total_bytes(torch.device("cpu")) - before < 10**6


def sample(seconds, total=None, event="forward a", **nbytes):
    return Sample(seconds, event, nbytes, total)


def test_what_is_drawn_of_memory_adds_up_to_the_whole():
    samples = [sample(0.0, 1000, parameters=10, master=5), sample(1.0, 1100, parameters=30, master=5, gradients=20)]
    stack = pictures.series(samples)
    assert stack == {"master": [5, 5], "parameters": [10, 30], "gradients": [0, 20], pictures.OTHER: [0, 60]}
    least = 1000 - 15  # libraries, say
    assert [sum(values) + least for values in zip(*stack.values(), strict=True)] == [1000, 1100]
    assert pictures.OTHER not in pictures.series([sample(0.0, parameters=10), sample(1.0, parameters=20)])


SPANS = [
    Span("phase", "forward", "", 10.0, 10.4),
    Span("unit", "forward net.blocks.0", "net.blocks.0", 10.0, 10.3),
    Span("wait", "wait for gather net.blocks.0", "net.blocks.0", 10.0, 10.1),
    Span("gather", "gather net.blocks.0", "net.blocks.0", 10.0, 10.1),
    Span("engine", "launch gather net.blocks.0", "net.blocks.0", 10.1, 10.15),
    Span("phase", "backward", "", 10.4, 11.0),
    Span("phase", "optimizer step", "", 11.0, 12.0),
]


@needs_matplotlib
def test_what_is_drawn_of_time():
    axes = pictures.timeline_figure(SPANS, "title").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["the step", "units", "standing still", "gathers"]
    bars = sorted(
        tuple(round(float(corner), 6) for corner in (path.vertices[:, 0].min(), path.vertices[:, 0].max()))
        for collection in axes.collections
        for path in collection.get_paths()
    )
    drawn = [span for span in SPANS if span.row != "engine"]
    assert bars == sorted((round(1e3 * (s.begin - 10), 6), round(1e3 * (s.end - 10), 6)) for s in drawn)
    assert "forward 400.0, backward 600.0, optimizer step 1000.0; waited for gathers 100.0" in axes.get_xlabel()
    assert {text.get_text() for text in axes.texts} == {"net.blocks.0", "0", *PHASES}  # the short bar


@needs_matplotlib
def test_what_is_drawn_of_memory():
    samples = [
        sample(0.0, 5_000_000, "forward", parameters=2_000_000, optimizer=1_000_000),
        sample(0.5, 9_000_000, "backward", parameters=4_000_000, optimizer=1_000_000),
        sample(1.0, 5_000_000, "end", parameters=2_000_000, optimizer=1_000_000),
    ]
    axes = pictures.memory_figure(samples, "title").axes[0]
    tops = [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in axes.collections]
    assert tops == pytest.approx([1, 5, 7])  # MB: the whole less the 2 MB of libraries
    assert axes.get_ylabel() == "memory, MB" and "least value" in axes.get_xlabel()
    assert [text.get_text().strip() for text in axes.texts] == [*PHASES[:2], "most: 7.0 MB, at 'backward'"]


@needs_matplotlib
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_pictures_are_written(rank, world_size, stage, tmp_path):
    report(rank, world_size, tmp_path, stage)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == FILES
    for name in FILES[:2]:
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")


def fails_on_all(rank, error, message, fit):
    """Rank 0 raises its own error, the others one with its words; before training."""
    with pytest.raises(error if rank == 0 else RuntimeError, match=message):
        fit()


class Untrained(Net):
    def training_step(self, batch, batch_idx):
        raise AssertionError("training has begun")


@distributed(world_size=2)
def test_without_matplotlib_a_run_does_not_begin(rank, world_size, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    fit = lambda: report(rank, world_size, tmp_path, 3, model=Untrained())
    fails_on_all(rank, ImportError, "pip install 'matplotlib", fit)


@distributed(world_size=2)
def test_a_folder_that_cannot_be_written_to_is_an_error_before_training(rank, world_size, tmp_path, no_pictures):
    (tmp_path / "file").touch()
    monitor = ZeroMonitor(report=tmp_path / "file" / "report")
    fit = lambda: report(rank, world_size, tmp_path, 3, monitor=monitor, model=Untrained())
    fails_on_all(rank, OSError, "file/report': Not a directory. Give a folder", fit)


@distributed(world_size=1)
def test_a_run_that_is_too_short_says_so(rank, world_size, tmp_path, no_pictures):
    monitor = ZeroMonitor(report=tmp_path / "report")
    with pytest.warns(UserWarning, match="no report: it takes four optimizer steps"):
        trainer(rank, world_size, tmp_path, zero(3), callbacks=[monitor], max_steps=3).fit(Net(), loader())
    assert not list((tmp_path / "report").iterdir())


@distributed(world_size=1)
def test_nobody_listens_once_the_report_is_written(rank, world_size, tmp_path, no_pictures):
    class Looks(Net):
        heard = ()

        def training_step(self, batch, batch_idx):
            engine = self.trainer.strategy.engine
            self.heard += (engine.events is not None or engine.offload.host.watch is not None,)
            return super().training_step(batch, batch_idx)

    model = Looks()
    report(rank, world_size, tmp_path, 3, model=model)
    assert model.heard == (False, True, True, True, False)


def labels_of(stage, comm, profiled=True):
    """How often each of the engine's labels is in torch's profile of a step."""
    model = Deep()
    engine = build_engine(model, comm, stage=stage)
    optimizer = adamw(model.named_parameters())
    engine_step(engine, model, optimizer, comm, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine_step(engine, model, optimizer, comm, 1)
    assert not engine.record._labels, "labels are left open"
    engine_step(engine, model, optimizer, comm, 2)
    engine.release(whole=True)
    return Counter({event.key: event.count for event in profile.key_averages() if event.key.startswith("zero: ")})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_a_profile_has_labels_with_units(rank, world_size, stage):
    with communicator() as comm:
        labels = labels_of(stage, comm)
    for unit in BLOCKS:
        for kind in ("forward", "backward", "reduce", "reduce wait"):
            assert labels[f"zero: {kind} {unit}"] >= 1, f"{kind} of {unit} at stage {stage}: {labels}"
        assert labels[f"zero: backward {unit}"] == 1
        # after the step (at stage 0 of nothing but this rank's own); at stage 3 twice, but for the last block
        assert labels[f"zero: gather {unit}"] == (2 if stage == 3 and unit != BLOCKS[-1] else 1)
    assert labels["zero: forward"] == labels["zero: backward"] == labels["zero: step"] == 1


@distributed(world_size=1)
def test_without_listener_and_profiler_nothing_is_made(rank, world_size, monkeypatch):
    """No label and no hook on outputs."""

    def never(*args):
        raise AssertionError("somebody has listened")

    monkeypatch.setattr("lightning_zero.engine.events.record_function", never)
    monkeypatch.setattr("lightning_zero.engine.hooks.tree_leaves", never)
    with communicator() as comm:
        model = Deep()
        engine = build_engine(model, comm, stage=3, offload_optimizer=OffloadConfig())
        optimizer = adamw(model.named_parameters())
        engine_step(engine, model, optimizer, comm, 0)
        engine.release(whole=True)
