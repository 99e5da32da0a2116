"""What users do around checkpoint folders: hooks, callbacks, links, changed modules."""

import os
import re
import shutil
import warnings

import pytest
import torch
from harness import distributed, run_ranks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from test_checkpoint import Rich, assert_same
from test_sharded import everything
from test_strategy import DIM, Net, loader, trainer, zero
from torch import nn

from lightning_zero import gathered
from lightning_zero.__main__ import main
from lightning_zero.checkpoint import reader
from lightning_zero.checkpoint.load import load_from_checkpoint


def sharded(stage, **settings):
    return zero(stage, state_dict_type="sharded", **settings)


def fit(rank, world_size, folder, model, stage=3, ckpt_path=None, settings=None, **more):
    """Train; the Trainer."""
    runner = trainer(rank, world_size, folder, sharded(stage, **(settings or {})), **more)
    runner.fit(model, loader(), ckpt_path=ckpt_path)
    return runner


class Save(Callback):
    """Saves while the module is sharded."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def saved(rank, world_size, folder, model, stage=3, when="during", **more):
    """Train, and save at the end of that or after it to ``folder / "a"``; the Trainer."""
    runner = fit(rank, world_size, folder, model, stage, callbacks=[Save(folder / "a")] * (when == "during"), **more)
    if when == "after":
        runner.save_checkpoint(folder / "a")
    return runner


def read(path):
    """A folder's state of the module, by whoever has Lightning and not us."""
    from lightning.pytorch.utilities.consolidate_checkpoint import _load_distributed_checkpoint

    return _load_distributed_checkpoint(path)


# Saving


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_saved_during_and_after_a_fit(rank, world_size, stage, tmp_path):
    """After it, and again after another fit of the same Trainer, and by callbacks in between: what the module is."""
    keep = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    model = Rich()
    runner = fit(rank, world_size, tmp_path, model, stage, callbacks=[keep], enable_checkpointing=True, max_epochs=2)
    plain = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in model.state_dict().items()}
    runner.save_checkpoint(tmp_path / "after")
    runner.fit_loop.max_epochs = 3
    runner.fit(model, loader())
    runner.save_checkpoint(tmp_path / "again")
    if rank == 0:
        assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [f"epoch={n}.ckpt" for n in range(3)]
        for path, want in [
            ("after", plain),
            ("kept/epoch=1.ckpt", plain),
            ("again", model.state_dict()),
            ("kept/epoch=2.ckpt", model.state_dict()),
        ]:
            got = read(tmp_path / path)
            assert_same({name: got["state_dict"][name] for name in want}, dict(want))
            assert got["optimizer_states"] if "optimizer_states" in got else got["optimizer_0"]


@distributed(world_size=2)
def test_weights_only(rank, world_size, tmp_path):
    """Such a folder has no optimizer; it is for test and predict, and resuming says what is not there."""
    model = Net()
    keep = ModelCheckpoint(tmp_path / "kept", save_weights_only=True, filename="it")
    runner = fit(rank, world_size, tmp_path, model, callbacks=[keep], enable_checkpointing=True)
    path = tmp_path / "kept" / "it.ckpt"
    assert not any(name.startswith("optimizer") for name in read(path))
    assert_same(dict(load_from_checkpoint(Net, path).state_dict()), dict(model.state_dict()))
    other = trainer(rank, world_size, tmp_path, sharded(3))
    assert other.test(Net(seed=1), loader(), ckpt_path=path, verbose=False) == runner.test(
        model, loader(), verbose=False
    )
    with pytest.raises(KeyError, match="contains only the model"):
        fit(rank, world_size, tmp_path, Net(), ckpt_path=path)


class NoOptimizer(Net):
    configure_optimizers = None


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_of_a_module_without_optimizer(rank, world_size, stage, tmp_path):
    """At other settings than it was saved with."""
    model = Net()
    runner = saved(rank, world_size, tmp_path, model)
    want = runner.test(model, loader(), verbose=False)
    other = trainer(rank, world_size, tmp_path, sharded(stage))
    assert other.test(NoOptimizer(seed=1), loader(), ckpt_path=tmp_path / "a", verbose=False) == want
    again = NoOptimizer(seed=1)
    predicted = other.predict(again, loader(), ckpt_path=tmp_path / "a")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(torch.cat(predicted), torch.cat(runner.predict(model, loader())))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_learning_rate_finder(rank, world_size, stage, tmp_path):
    """It saves, trains, and goes back: the training after it is the one without it, at the rate that it found."""

    class Rated(Rich):
        def __init__(self):
            super().__init__()
            self.lr = 0.01

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    find = LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    model, want = Rated(), Rated()
    runner = fit(rank, world_size, tmp_path, model, stage, callbacks=[find])
    want.lr = model.lr
    fit(rank, world_size, tmp_path, want, stage)
    assert find.optimal_lr is not None and runner.global_step == 4
    got = {name: value for name, value in model.state_dict().items() if not name.startswith("extra")}
    # as under ddp, what is neither parameter nor buffer of a checkpoint goes on
    assert_same(got, {name: value for name, value in want.state_dict().items() if not name.startswith("extra")})
    assert not rank or not [path for path in tmp_path.iterdir() if path.name.startswith(".lr_find")]


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (3, 1)])
def test_weight_averaging(ranks, stage, tmp_path):
    """The average and the current weights both come back."""

    class Both(Callback):
        def average(self, trainer):
            average = next(c for c in trainer.callbacks if isinstance(c, EMAWeightAveraging))._average_model
            return {name: value.clone() for name, value in average.state_dict().items()}

        def on_train_start(self, trainer, pl_module):
            self.start = everything(trainer), self.average(trainer)

        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                self.saved = everything(trainer), self.average(trainer)
                trainer.save_checkpoint(tmp_path / "a")

    def save(rank, world_size):
        both = Both()
        fit(rank, world_size, tmp_path, Net(), callbacks=[EMAWeightAveraging(decay=0.9), both], max_epochs=2)
        return both.saved

    def resume(rank, world_size):
        both, model = Both(), Net(seed=1)
        more = {"callbacks": [EMAWeightAveraging(decay=0.9), both], "max_epochs": 2}
        fit(rank, world_size, tmp_path, model, stage, ckpt_path=tmp_path / "a", **more)
        return both.start, dict(load_from_checkpoint(Net, tmp_path / "a").state_dict())

    state, average = run_ranks(save, 2)[0]
    got, loaded = run_ranks(resume, ranks)[0]
    assert_same(got[0], state)
    assert_same(got[1], average)
    assert_same(loaded, {name[7:]: value for name, value in average.items() if name.startswith("module.")})


@pytest.mark.parametrize(
    ("first", "second", "when"), [(True, False, "after"), (False, True, "during"), (True, True, "during")]
)
def test_compiled_blocks(first, second, when, tmp_path):
    """Names in folders are those of the module that is not compiled."""

    def make(compiled, seed):
        model = Rich(seed)
        if compiled:
            for number in (0, 1, 2):
                model.blocks[number] = torch.compile(model.blocks[number], backend="eager")
        return model

    def body(rank, world_size):
        want = make(first, 0)
        saved(rank, world_size, tmp_path, want, when=when)
        assert set(read(tmp_path / "a")["state_dict"]) == set(Rich().state_dict())
        got = make(second, 1)
        trainer(rank, world_size, tmp_path, sharded(3)).test(got, loader(), ckpt_path=tmp_path / "a", verbose=False)
        assert_same(list(got.state_dict().values()), list(want.state_dict().values()))
        fit(rank, world_size, tmp_path, make(second, 1), 1, ckpt_path=tmp_path / "a", max_epochs=2)

    run_ranks(body, 2)


class Adapter(Net):
    """Its own state_dict gives only what is trained."""

    strict_loading = False

    def __init__(self, seed=0):
        super().__init__(seed)
        self.blocks.requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("blocks")}

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Frozen(Adapter):
    def state_dict(self, *args, **kwargs):
        return Net.state_dict(self, *args, **kwargs)


class Tied(Frozen):
    """What is frozen has two names."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.blocks_again = self.blocks


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (Adapter, {}),
        (Frozen, {"exclude_frozen": True}),
        (Frozen, {"exclude_frozen": True, "state_dict_type": "full"}),
        (Tied, {"exclude_frozen": True}),
        (Tied, {"exclude_frozen": True, "state_dict_type": "full"}),
    ],
)
def test_only_what_is_trained(rank, world_size, stage, cls, settings, tmp_path):
    def run(model, **more):
        strategy = zero(stage, **{"state_dict_type": "sharded", **settings})
        runner = trainer(rank, world_size, tmp_path, strategy, max_epochs=2)
        runner.fit(model, loader(), **more)
        return runner

    want = cls()
    strategy = zero(stage, **{"state_dict_type": "sharded", **settings})
    trainer(rank, world_size, tmp_path, strategy, max_epochs=2, callbacks=[Save(tmp_path / "a")]).fit(want, loader())
    state = torch.load(tmp_path / "a") if settings.get("state_dict_type") == "full" else read(tmp_path / "a")
    assert set(state["state_dict"]) == {
        name for name in dict(Net().named_parameters()) if not name.startswith("blocks")
    }
    got = cls(seed=1)
    for mine, theirs in zip(got.blocks.parameters(), want.blocks.parameters(), strict=True):
        mine.data.copy_(theirs)
    run(got, ckpt_path=tmp_path / "a")
    assert_same(dict(nn.Module.state_dict(got)), dict(nn.Module.state_dict(want)))


# Hooks


class Hooked(Net):
    """Drops, renames, adds and edits."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.mean = torch.zeros(3)

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        del state["signs.weight"]
        state["neck.weight"] = state.pop("head.weight")
        state["more"] = torch.arange(3.0)
        checkpoint["mean"] = self.mean + 2
        checkpoint["teacher"] = {"head": state["head.bias"], "steps": 3}
        checkpoint["vocabulary"] = {1: "a", 2: ("b", 3)}

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        self.mean = checkpoint["mean"]
        assert checkpoint["vocabulary"] == {1: "a", 2: ("b", 3)}
        assert checkpoint["teacher"]["steps"] == 3
        self.teacher = checkpoint["teacher"]["head"] * 1
        assert torch.equal(state.pop("more"), torch.arange(3.0))
        state["head.weight"] = state.pop("neck.weight") + 1
        state["norm.bias"].fill_(7)
        state["norm.weight"] *= 2
        state["blocks.0.weight"][1:3].zero_()
        state["signs.weight"] = torch.zeros(2, DIM)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("when", "target"), [("during", 0), ("after", 3)])
def test_hooks_drop_rename_add_and_edit(rank, world_size, stage, when, target, tmp_path):
    want, got = Hooked(), Hooked(seed=1)
    saved(rank, world_size, tmp_path, want, stage, when)
    trainer(rank, world_size, tmp_path, sharded(target)).test(got, loader(), ckpt_path=tmp_path / "a", verbose=False)
    state = dict(want.state_dict())
    state["head.weight"] = state["head.weight"] + 1
    state["norm.bias"] = torch.full((DIM,), 7.0)
    state["norm.weight"] = state["norm.weight"] * 2
    state["blocks.0.weight"] = torch.cat(
        [state["blocks.0.weight"][:1], torch.zeros(2, DIM), state["blocks.0.weight"][3:]]
    )
    state["signs.weight"] = torch.zeros(2, DIM)
    assert_same(dict(got.state_dict()), state)
    assert_same(got.mean, torch.full((3,), 2.0))
    assert_same(got.teacher, want.head.bias.detach())


class Moved(Net):
    """Puts its weights elsewhere, and finds them again."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["generator"] = checkpoint.pop("state_dict")

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = checkpoint.pop("generator")


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["model", "master", "optimizer_1"])
def test_names_that_a_folder_has_for_itself(rank, world_size, name, tmp_path):
    """Whoever wants parts of parameters there is told so; other values may have these names."""

    class Named(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint[name] = {"w": checkpoint["state_dict"]["head.weight"]} if parts else {"w": torch.ones(2)}

    parts = False
    saved(rank, world_size, tmp_path, Named())
    assert_same(reader.checkpoint(reader.Folder(tmp_path / "a"), True)[name], {"w": torch.ones(2)})
    parts = True
    with pytest.raises(ValueError, match=f"{name}.*another name"):
        saved(rank, world_size, tmp_path, Named())


@distributed(world_size=2)
@pytest.mark.parametrize("when", ["during", "after"])
def test_a_hook_that_moves_the_weights(rank, world_size, when, tmp_path):
    want, got = Moved(), Moved(seed=1)
    saved(rank, world_size, tmp_path, want, when=when)
    trainer(rank, world_size, tmp_path, sharded(1)).test(got, loader(), ckpt_path=tmp_path / "a", verbose=False)
    assert_same(dict(got.state_dict()), dict(want.state_dict()))


READS = {
    "arithmetic": lambda value: value + 1,
    "item": lambda value: value.flatten()[0].item(),
    "float": lambda value: float(value.sum()),
    "clone": lambda value: value.clone(),
    "half": lambda value: value.half(),
    "numpy": lambda value: value.numpy(),
    "tolist": lambda value: value.tolist(),
    "norm": torch.linalg.vector_norm,
    "save": lambda value: torch.save(value, os.devnull),
    "copy": lambda value: torch.empty(value.shape).copy_(value),
    "index": lambda value: value[0],
    "print": lambda value: str(value.detach()),
}


@distributed(world_size=2)
def test_reading_a_part_in_a_hook_is_refused(rank, world_size, tmp_path):
    """On every rank, in words that say what to do; and then there is no folder."""
    words = r"'blocks\.0\.weight' cannot be read here.*state_dict_type=\"full\""

    class Reads(Net):
        def on_save_checkpoint(self, checkpoint):
            value = checkpoint["state_dict"]["blocks.0.weight"]
            for read in READS.values():
                with pytest.raises(RuntimeError, match=words):
                    read(value)
            value.sum()

    with pytest.raises(RuntimeError, match=words):
        saved(rank, world_size, tmp_path, Reads())
    assert not (tmp_path / "a").exists()


@distributed(world_size=2)
def test_shape_dtype_and_names_can_be_asked_for_in_a_hook(rank, world_size, tmp_path):
    class Looks(Net):
        def on_save_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            assert {name: (v.shape, v.dtype) for name, v in state.items()} == {
                name: (v.shape, v.dtype) for name, v in Net().state_dict().items()
            }
            assert sum(value.numel() for value in state.values()) == sum(p.numel() for p in self.parameters())
            assert "shape=(8, 8)" in repr(state["blocks.0.weight"])
            assert state["head.bias"].device.type == "cpu" and isinstance(state["head.bias"], torch.Tensor)
            checkpoint["names"] = sorted(state)

    saved(rank, world_size, tmp_path, Looks())
    assert read(tmp_path / "a")["names"] == sorted(Net().state_dict())


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("when", ["during", "after"])
def test_state_dict_called_in_a_hook(rank, world_size, stage, when, tmp_path):
    """It has values, or says why it has none; in ``gathered`` it always has."""
    seen = []

    class Own(Net):
        def on_save_checkpoint(self, checkpoint):
            try:
                seen.append({name: value.clone() for name, value in self.state_dict().items()})
            except RuntimeError as error:
                assert re.search(r"is sharded.*gathered\(module\)", str(error))
                seen.append(None)
            with gathered(self):
                seen.append({name: value.clone() for name, value in self.state_dict().items()})
                checkpoint["teacher"] = seen[-1]

    model = Own()
    saved(rank, world_size, tmp_path, model, stage, when)
    assert (seen[0] is None) == (stage == 3 and when == "during")
    for state in [*filter(None, seen), read(tmp_path / "a")["teacher"]]:
        assert_same({name: state[name] for name in model.state_dict()}, dict(model.state_dict()))


@distributed(world_size=2)
@pytest.mark.parametrize("later", [False, True])
def test_a_part_below_a_key_that_is_no_string_is_refused(rank, world_size, later, tmp_path):
    """It would come back as a string."""

    class Numbered(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["teachers"] = {7: {"head": checkpoint["state_dict"]["head.weight"]}}

    with pytest.raises(TypeError, match="key 7"):
        saved(rank, world_size, tmp_path, Numbered(), settings={"async_save": later})
    assert not list(tmp_path.glob("*a*"))


class NoneToStep(Net):
    def configure_optimizers(self):
        return None


class NothingToStep(Net):
    """Steps by itself, or only collects."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return []


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("cls", [NoneToStep, NothingToStep])
def test_a_module_without_optimizer_goes_on(rank, world_size, cls, kind, tmp_path):
    """From a folder, and from the file that is made of it."""
    saved(rank, world_size, tmp_path, cls())
    path = tmp_path / "a"
    if kind == "full":
        path = tmp_path / "a.consolidated.ckpt"
        if rank == 0:
            main(["checkpoint", "consolidate", str(tmp_path / "a")])
    torch.distributed.barrier()
    runner = fit(rank, world_size, tmp_path, cls(), ckpt_path=path, max_epochs=2)
    assert runner.current_epoch == 2


@distributed(world_size=2)
@pytest.mark.parametrize("how", ["drop", "rename", "add", "add a part", "drop all"])
def test_a_hook_that_rank_0_alone_runs(rank, world_size, how, tmp_path):
    """With files that is a habit, for only rank 0 has values. Here ranks part: an error on all, or a right folder."""

    class OnZero(Net):
        def on_save_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            if self.trainer.is_global_zero:
                if how == "drop":
                    del state["blocks.0.weight"]
                elif how == "rename":
                    state["first"] = state.pop("blocks.0.weight")
                elif how == "add":
                    checkpoint["note"] = torch.ones(2)
                    state["note"] = torch.ones(2)
                elif how == "add a part":
                    checkpoint["teacher"] = {"w": state["blocks.0.weight"]}
                else:
                    checkpoint["state_dict"] = {}

    if how == "add":  # nothing that other ranks have a part of
        saved(rank, world_size, tmp_path, OnZero())
        assert_same(read(tmp_path / "a")["note"], torch.ones(2))
        assert_same(read(tmp_path / "a")["state_dict"]["note"], torch.ones(2))
        return
    with pytest.raises(RuntimeError, match="on all ranks"):
        saved(rank, world_size, tmp_path, OnZero())
    assert not (tmp_path / "a").exists()


class Odd(nn.Module):
    """Extra state of odd structure."""

    def __init__(self):
        super().__init__()
        self.state = None

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


EXTRA = {
    "number": 3,
    "tensor": torch.arange(3),
    "none": None,
    "text": "abc",
    "bytes": b"abc",
    "empty": {},
    "other keys": {1: "a", (2, 3): "b", 7: torch.ones(2)},
    "tensors": [torch.arange(3), (torch.ones(2, 2), 5), []],
    "tuple": (1, 2),
    "dots": {"a.b": torch.tensor(3.0), "a": {"b": torch.tensor(4.0)}},
}


@distributed(world_size=2)
def test_extra_state_comes_back_as_it_was(rank, world_size, tmp_path):
    class Extra(Net):
        def __init__(self, seed=0):
            super().__init__(seed)
            self.odd = nn.ModuleDict({kind: Odd() for kind in EXTRA})

    model, again = Extra(), Extra(seed=1)
    for kind, state in EXTRA.items():
        model.odd[kind].state = state
    saved(rank, world_size, tmp_path, model)
    trainer(rank, world_size, tmp_path, sharded(1)).test(again, loader(), ckpt_path=tmp_path / "a", verbose=False)
    for kind, state in EXTRA.items():  # tensors, too, and none of them still in the folder
        assert repr(again.odd[kind].state) == repr(state)


# What does not fit


def changed(kind):
    """A module that a folder of ``Net`` does not fit."""

    class Changed(Net):
        def __init__(self, seed=1):
            super().__init__(seed)
            if kind == "missing":
                self.more = nn.Linear(2, 2)
            elif kind == "unexpected":
                del self.blocks[2]
            elif kind == "shape":
                self.blocks[1] = nn.Linear(DIM, DIM + 1)
            elif kind == "order":
                self.blocks[0].weight = nn.Parameter(torch.zeros(1, DIM * DIM))

        def configure_optimizers(self):
            params = list(self.parameters())
            make = lambda params: torch.optim.AdamW(params, lr=0.01)
            if kind == "optimizers":
                self.automatic_optimization = False
                return make(params[:2]), make(params[2:])
            if kind == "groups":
                return make([{"params": params[:2]}, {"params": params[2:]}])
            if kind == "members":
                return make(params[:-1])
            if kind == "others":
                return make([*params[:-1], nn.Parameter(torch.ones(1))])
            return make(params)

    return Changed()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("missing", RuntimeError, r"Missing key.*more\.weight"),
        ("unexpected", RuntimeError, r"Unexpected key.*blocks\.2\.weight"),
        ("shape", RuntimeError, r"size mismatch for blocks\.1\.weight.*\[8, 8\].*\[9, 8\]"),
        ("order", RuntimeError, r"size mismatch for blocks\.0\.weight.*\[8, 8\].*\[1, 64\]"),
        ("optimizers", ValueError, r"1 optimizer\(s\).* 2"),
        ("groups", ValueError, r"1 parameter groups.* 2"),
        ("members", ValueError, r"group 0 .* 11 parameters.* 10|group 0 .* has \d+ parameters"),
        ("others", ValueError, r"'head\.bias', 'param_\d+' only in one"),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(rank, world_size, stage, kind, error, words, tmp_path):
    """And has changed nothing in the module."""
    saved(rank, world_size, tmp_path, Net())
    model = changed(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=f"(?s){words}"):
        fit(rank, world_size, tmp_path, model, stage, ckpt_path=tmp_path / "a")
    if error is RuntimeError:  # before the module is sharded
        assert_same(dict(model.state_dict()), before)


@distributed(world_size=2)
def test_strict_loading_off(rank, world_size, tmp_path):
    """What is in both is loaded, what is in one stays or is left."""
    want = Net()
    saved(rank, world_size, tmp_path, want)
    got = changed("missing")
    del got.blocks[2]
    got.strict_loading = False
    before = got.more.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(rank, world_size, tmp_path, sharded(3)).test(got, loader(), ckpt_path=tmp_path / "a", verbose=False)
    assert_same(got.more.weight.detach(), before)
    assert_same(got.blocks[1].weight.detach(), want.blocks[1].weight.detach())
    got = load_from_checkpoint(Net, tmp_path / "a", strict=False)
    assert_same(dict(got.state_dict()), dict(want.state_dict()))


# Links


@distributed(world_size=2)
def test_last_is_a_link(rank, world_size, tmp_path):
    """``save_last="link"``: it leads to a whole folder while others go, and training goes on from it."""

    class Follow(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.is_global_zero and trainer.current_epoch:
                last = tmp_path / "kept" / "last.ckpt"
                self.seen.append((last.is_symlink(), (last / "manifest.json").exists()))

    follow = Follow()
    follow.seen = []

    def run(epochs, model, **more):
        keep = ModelCheckpoint(tmp_path / "kept", save_last="link", save_top_k=1, monitor=None, filename="{epoch}")
        runner = trainer(
            rank,
            world_size,
            tmp_path,
            sharded(3),
            callbacks=[keep, follow],
            enable_checkpointing=True,
            max_epochs=epochs,
        )
        runner.fit(model, loader(), **more)
        return runner

    want, got = Rich(), Rich(seed=1)
    run(2, Rich())
    assert all(seen == (True, True) for seen in follow.seen)
    left = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert left == ["epoch=1.ckpt", "last.ckpt"]
    runner = run(4, got, ckpt_path="last")
    assert runner.current_epoch == 4
    shutil.rmtree(tmp_path / "kept") if rank == 0 else None
    runner.strategy.barrier()
    run(4, want)
    assert_same(dict(got.state_dict()), dict(want.state_dict()))
    assert os.path.realpath(tmp_path / "kept" / "last.ckpt").endswith("epoch=3.ckpt")


@distributed(world_size=2)
@pytest.mark.parametrize("whole", [True, False])
def test_a_link_that_leads_nowhere(rank, world_size, whole, tmp_path):
    """``ckpt_path="last"`` does not start afresh without a word."""
    keep = lambda: ModelCheckpoint(tmp_path / "kept", save_last="link", filename="{epoch}", save_top_k=-1)
    model = Net()
    runner = fit(rank, world_size, tmp_path, model, callbacks=[keep()], enable_checkpointing=True, max_epochs=2)
    if rank == 0:
        shutil.rmtree(tmp_path / "kept" / "epoch=1.ckpt")
        if not whole:
            shutil.rmtree(tmp_path / "kept" / "epoch=0.ckpt")
    runner.strategy.barrier()
    words = r"epoch=0\.ckpt" if whole else "Nothing beside it can be loaded"
    with pytest.raises(FileNotFoundError, match=f"leads nowhere.*{words}"):
        fit(rank, world_size, tmp_path, Net(), ckpt_path="last", callbacks=[keep()], enable_checkpointing=True)
