"""``python -m lightning_zero checkpoint``: what it says of folders, and what it makes of them."""

import subprocess
import sys
from pathlib import Path

import forked
import pytest
import safetensors.torch
import torch
from harness import environment, run_ranks
from lightning.pytorch import Callback, LightningModule
from test_strategy import trainer
from torch import nn
from tqdm import tqdm

import lightning_zero
from lightning_zero.__main__ import main
from lightning_zero.checkpoint import folder, reader, safetensors_write, temporary

tqdm.monitor_interval = 0  # its thread would hang in forks

KILLED = {"export": "publish", "consolidate": "commit"}
"""The last step, before which the process is killed."""

ROOT = Path(__file__).resolve().parent.parent


class Tied(LightningModule):
    """Two layers with one weight, a buffer, and hyperparameters that may be objects."""

    def __init__(self, dim=6, where=None):
        super().__init__()
        self.save_hyperparameters()
        self.first, self.norm, self.second = nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Linear(dim, dim)
        self.second.weight = self.first.weight

    def training_step(self, batch, batch_idx):
        return self.second(self.norm(self.first(batch))).square().mean()

    def configure_optimizers(self):
        biases = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": [self.first.weight]}]
        return torch.optim.AdamW(groups, lr=0.01)


def _save(rank, world_size, path, hparams, settings):
    torch.manual_seed(0)
    strategy = lightning_zero.ZeroStrategy(stage=3, min_unit_bytes=0, state_dict_type="sharded", **settings)
    own = trainer(rank, world_size, path.parent, strategy, max_steps=3)
    own.fit(Tied(**hparams), torch.utils.data.DataLoader(torch.randn(24, 6), batch_size=4))
    own.save_checkpoint(path)
    strategy.training.state_dict_type = "full"
    own.save_checkpoint(path.with_name("full.ckpt"))


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def _save_in_bf16(rank, world_size, path):
    strategy = lightning_zero.ZeroStrategy(stage=3, state_dict_type="sharded", precision="bf16-true")
    own = trainer(rank, world_size, path.parent, strategy, max_steps=3, callbacks=[Saves(path)])
    own.fit(Tied().bfloat16(), torch.utils.data.DataLoader(torch.randn(24, 6), batch_size=4))


def save(path, settings=None, **hparams):
    """A folder at ``path`` and the same as one file."""
    run_ranks(_save, 2, path, hparams, settings or {})


def killed(*_):
    raise KeyboardInterrupt


def say(capsys, *arguments):
    main(["checkpoint", *map(str, arguments)])
    return capsys.readouterr().out


def test_what_is_in_a_folder(tmp_path, capsys):
    save(tmp_path / "a.ckpt")
    lines = [line.split() for line in say(capsys, "info", tmp_path / "a.ckpt").splitlines()]
    sections = {line[0]: line[1:3] for line in lines if line[0] in ("state_dict", "optimizer_0", "model")}
    parameters = 6 * 6 + 6 + 6 + 6 + 6
    elements = parameters + 36 + 6 + 6 + 1  # the tied weight has two names; the buffers
    assert sections == {
        "state_dict": ["9", str(elements)],
        "model": ["9", str(elements)],
        "optimizer_0": ["15", str(2 * parameters + 5)],
    }
    assert "complete" in say(capsys, "verify", tmp_path / "a.ckpt")


def test_one_file_that_is_ddps(tmp_path, capsys):
    save(tmp_path / "a.ckpt")
    assert say(capsys, "consolidate", tmp_path / "a.ckpt").strip() == str(tmp_path / "a.consolidated.ckpt")
    made, want = (torch.load(tmp_path / name) for name in ("a.consolidated.ckpt", "full.ckpt"))
    assert made.keys() == want.keys() and made["state_dict"].keys() == want["state_dict"].keys()
    assert all(torch.equal(value, want["state_dict"][name]) for name, value in made["state_dict"].items())
    assert made["state_dict"]["first.weight"].data_ptr() == made["state_dict"]["second.weight"].data_ptr()
    (state,), (wanted) = made["optimizer_states"], want["optimizer_states"][0]
    assert state["param_groups"] == wanted["param_groups"] and state["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        assert all(torch.equal(state["state"][number][key], value) for key, value in entries.items())
    assert made["loops"] == want["loops"]
    module = Tied.load_from_checkpoint(tmp_path / "a.consolidated.ckpt")
    assert module.first.weight is module.second.weight
    with pytest.raises(SystemExit, match=r"exists: choose another name"):
        main(["checkpoint", "consolidate", str(tmp_path / "a.ckpt")])
    assert not list(tmp_path.glob(".*"))


def test_weights_as_safetensors(tmp_path, capsys):
    """To the byte what ``save_file`` writes; the tied weight once."""
    save(tmp_path / "a.ckpt")
    want = torch.load(tmp_path / "full.ckpt")["state_dict"]
    del want["second.weight"]
    for dtype in (None, "bf16"):
        to = [] if dtype is None else ["--dtype", dtype, "--output", tmp_path / "out.safetensors"]
        made = Path(say(capsys, "export", tmp_path / "a.ckpt", *to).strip())
        if dtype:
            want = {name: value.bfloat16() if value.is_floating_point() else value for name, value in want.items()}
        safetensors.torch.save_file(want, tmp_path / "want.safetensors", {"format": "pt"})
        assert made.read_bytes() == (tmp_path / "want.safetensors").read_bytes()
    with pytest.raises(SystemExit, match=r"exists: choose another name"):
        main(["checkpoint", "export", str(tmp_path / "a.ckpt")])
    say(capsys, "export", tmp_path / "a.ckpt", "--output", tmp_path / "folder", "--max-file-bytes", 200)
    assert (tmp_path / "folder" / "model.safetensors.index.json").exists()


def test_more_than_the_weights_own_dtype_comes_from_the_masters(tmp_path, capsys):
    """As ``save_safetensors`` has it."""
    run_ranks(_save_in_bf16, 2, tmp_path / "a.ckpt")
    masters = reader.Folder(tmp_path / "a.ckpt").nested("master")
    for dtype, options in ((torch.bfloat16, []), (torch.float32, ["--dtype", "fp32"])):
        made = tmp_path / f"{dtype}.safetensors"
        say(capsys, "export", tmp_path / "a.ckpt", "--output", made, *options)
        for name, value in safetensors.torch.load_file(made).items():
            if name in masters:
                assert torch.equal(value, masters[name].whole().to(dtype)), name
    exact = masters["first.weight"].whole()
    assert not torch.equal(exact, exact.bfloat16().float())


def test_a_folder_that_is_called_by_a_dot(tmp_path, capsys, monkeypatch):
    save(tmp_path / "a.ckpt")
    monkeypatch.chdir(tmp_path / "a.ckpt")
    for action, name in (("export", "a.safetensors"), ("consolidate", "a.consolidated.ckpt")):
        assert say(capsys, action, ".").strip() == str(tmp_path / name) and (tmp_path / name).is_file()


@pytest.mark.parametrize("action", ["export", "consolidate"])
def test_what_a_killed_process_has_left_goes_at_the_next(action, tmp_path, capsys, monkeypatch):
    save(tmp_path / "a.ckpt")
    monkeypatch.setattr(temporary, "drop", lambda path: None)  # a killed process does not
    monkeypatch.setattr(folder if action == "consolidate" else safetensors_write, KILLED[action], killed)
    with pytest.raises(KeyboardInterrupt):
        say(capsys, action, tmp_path / "a.ckpt")
    assert len(list(tmp_path.glob(".a.*.part"))) == 1
    monkeypatch.undo()
    temporary._in_use.clear()
    say(capsys, action, tmp_path / "a.ckpt")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("later", [False, True])
def test_folders_with_16_bit_weights(tmp_path, capsys, later):
    save(tmp_path / "a.ckpt", settings={"save_16bit_weights": True, "async_save": later})
    want = torch.load(tmp_path / "full.ckpt")["state_dict"]
    made = safetensors.torch.load_file(tmp_path / "a.ckpt" / "model.safetensors")
    assert made.keys() == want.keys() - {"second.weight"}
    for name, value in made.items():
        assert torch.equal(value, want[name].bfloat16() if want[name].is_floating_point() else want[name])
    assert "complete" in say(capsys, "verify", tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"model.safetensors is missing"):
        main(["checkpoint", "verify", str(tmp_path / "a.ckpt")])


def test_objects_need_trust(tmp_path, capsys):
    save(tmp_path / "a.ckpt", where=Path("somewhere"))
    for action in ("info", "consolidate"):
        with pytest.raises(SystemExit, match=r"(?s)may run code .* --trust"):
            main(["checkpoint", action, str(tmp_path / "a.ckpt")])
    say(capsys, "consolidate", tmp_path / "a.ckpt", "--trust")
    made = torch.load(tmp_path / "a.consolidated.ckpt", weights_only=False)
    assert made["hyper_parameters"]["where"] == Path("somewhere")


class Holder:
    """Tensors in an object: two that share memory, one of them a part; an empty one, and a parameter."""

    def __init__(self, values):
        self.values, self.part = values, values[1:3]
        self.nothing, self.param = torch.empty(0, 3), nn.Parameter(torch.full((2,), 5.0))


def test_tensors_in_objects_are_in_the_file(tmp_path, capsys):
    save(tmp_path / "a.ckpt", where=Holder(torch.arange(4.0)))
    say(capsys, "consolidate", tmp_path / "a.ckpt", "--trust")
    made, want = (torch.load(tmp_path / name, weights_only=False) for name in ("a.consolidated.ckpt", "full.ckpt"))
    found = made["hyper_parameters"]["where"]
    assert found.values.tolist() == [0, 1, 2, 3] and found.part.tolist() == [1, 2]
    assert found.nothing.shape == (0, 3) and isinstance(found.param, nn.Parameter) and found.param.tolist() == [5, 5]
    assert torch.equal(made["state_dict"]["first.weight"], want["state_dict"]["first.weight"])


def test_damage_is_found(tmp_path):
    save(tmp_path / "a.ckpt")
    data = tmp_path / "a.ckpt" / "__0_0.distcp"
    before = data.read_bytes()
    for content, words in (
        (before[:-1], r"__0_0.distcp has [\d,]+ bytes instead of"),
        (before[:700] + bytes([before[700] ^ 1]) + before[701:], r"__0_0.distcp is damaged between bytes 0 and"),
    ):
        data.write_bytes(content)
        with pytest.raises(SystemExit, match=words):
            main(["checkpoint", "verify", str(tmp_path / "a.ckpt")])
    data.unlink()
    with pytest.raises(SystemExit, match=r"__0_0.distcp is missing. Use another checkpoint"):
        main(["checkpoint", "info", str(tmp_path / "a.ckpt")])
    with pytest.raises(SystemExit, match=r"There is no checkpoint at"):
        main(["checkpoint", "info", str(tmp_path / "b.ckpt")])
    with pytest.raises(SystemExit, match=r"full.ckpt is a file: torch.load reads it"):
        main(["checkpoint", "verify", str(tmp_path / "full.ckpt")])


def test_from_the_command_line(tmp_path):
    save(tmp_path / "a.ckpt")
    words = ["-m", "lightning_zero", "checkpoint", "verify", str(tmp_path / "a.ckpt")]
    output, code = forked.run(*words, cwd=tmp_path)
    assert code == 0 and "complete, and as it was written" in output and "100%" not in output, output
    (tmp_path / "a.ckpt" / "meta.pt").unlink()
    done = subprocess.run([sys.executable, *words], env=environment(ROOT), text=True, capture_output=True, timeout=120)
    assert done.returncode == 1 and "meta.pt is missing" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("action", ["consolidate", "export"])
def test_where_the_result_goes(action, tmp_path, capsys, monkeypatch):
    """Beside the folder, under its whole name; into a directory that is made; or an error that names the place."""
    save(tmp_path / "a.ckpt")
    ending = ".consolidated.ckpt" if action == "consolidate" else ".safetensors"
    (tmp_path / "a.ckpt").rename(tmp_path / "run-1.5")
    say(capsys, action, tmp_path / "run-1.5")
    for number, here in enumerate([".", ".."]):
        monkeypatch.chdir(tmp_path / "run-1.5")
        (tmp_path / f"run-1.5{ending}").unlink()
        if number:
            (tmp_path / "run-1.5" / "inner").mkdir()
            monkeypatch.chdir("inner")
        say(capsys, action, here)
        assert (tmp_path / f"run-1.5{ending}").exists()
    say(capsys, action, tmp_path / "run-1.5", "--output", tmp_path / "new" / "place" / f"it{ending}")
    assert (tmp_path / "new" / "place" / f"it{ending}").exists()
    with pytest.raises(SystemExit, match=r"full.ckpt"):
        main(["checkpoint", action, str(tmp_path / "run-1.5"), "--output", str(tmp_path / "full.ckpt" / f"it{ending}")])


class Sparse(LightningModule):
    """A buffer and extra state that are no dense tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _save_sparse(rank, world_size, path):
    strategy = lightning_zero.ZeroStrategy(stage=3, state_dict_type="sharded")
    own = trainer(rank, world_size, path.parent, strategy)
    own.fit(Sparse(), torch.randn(4, 2))
    own.save_checkpoint(path)


def test_what_is_no_dense_tensor(tmp_path, capsys):
    """Left out of weights, which is said; one file with everything in it is refused."""
    run_ranks(_save_sparse, 1, tmp_path / "a.ckpt")
    assert "left out" in (said := say(capsys, "export", tmp_path / "a.ckpt"))
    assert all(name in said for name in ("graph", "_extra_state"))
    assert sorted(safetensors.torch.load_file(tmp_path / "a.safetensors")) == ["layer.bias", "layer.weight"]
    with pytest.raises(SystemExit, match=r"layout torch.sparse_coo"):
        main(["checkpoint", "consolidate", str(tmp_path / "a.ckpt")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "a.safetensors"]


@pytest.mark.parametrize("name", ["meta.pt", ".metadata", "__0_0.distcp"])
def test_damage_without_checksums_is_an_error_in_words(name, tmp_path):
    """As in folders of other strategies."""
    save(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "manifest.json").unlink()
    path = tmp_path / "a.ckpt" / name
    before = path.read_bytes()
    for content in (b"", before[: len(before) // 2], bytes(len(before)), b"\xff" * len(before)):
        path.write_bytes(content)
        for action in ("export", "consolidate"):
            if (action, name) != ("export", "meta.pt"):  # which it does not read
                with pytest.raises(SystemExit, match=r"a.ckpt"):
                    main(["checkpoint", action, str(tmp_path / "a.ckpt")])
