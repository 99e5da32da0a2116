"""House rules that check themselves: the direction of imports, sizes, and where collectives are called."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_zero"
FILES = sorted(PACKAGE.rglob("*.py"))
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
}  # fmt: skip


def parsed(path):
    return ast.parse(path.read_text())


def imported(path):
    """Full names of all modules and names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_any(path, *prefixes):
    return {name for name in imported(path) if any(name == p or name.startswith(p + ".") for p in prefixes)}


def under(*parts):
    files = [path for path in FILES if path.relative_to(PACKAGE).parts[: len(parts)] == parts]
    assert files, f"nothing is in {parts}"
    return files


def name_of(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", under("config"), ids=name_of)
def test_config_imports_neither_torch_nor_omegaconf(path):
    foreign = ("torch", "lightning", "lightning_zero.engine", "lightning_zero.checkpoint", "lightning_zero.strategy")
    assert not imports_any(path, *foreign)
    if path.name != "hydra.py":
        assert not imports_any(path, "omegaconf", "hydra")


@pytest.mark.parametrize("path", under("engine"), ids=name_of)
def test_engine_knows_neither_lightning_nor_checkpoints(path):
    upwards = ("lightning_zero.checkpoint", "lightning_zero.strategy", "lightning_zero.precision")
    assert not imports_any(
        path, "lightning", "lightning_fabric", "pytorch_lightning", "torch.distributed.checkpoint", *upwards
    )


@pytest.mark.parametrize("path", under("checkpoint"), ids=name_of)
def test_checkpoint_knows_no_lightning(path):
    assert not imports_any(path, "lightning", "lightning_zero.strategy", "lightning_zero.precision")


@pytest.mark.parametrize("path", under("report"), ids=name_of)
def test_report_knows_no_lightning(path):
    assert not imports_any(path, "lightning", "lightning_zero.strategy", "lightning_zero.precision")


@pytest.mark.parametrize("path", [p for p in FILES if "checkpoint" not in p.parts], ids=name_of)
def test_only_checkpoint_imports_distributed_checkpoint(path):
    assert not imports_any(path, "torch.distributed.checkpoint")


@pytest.mark.parametrize("path", [p for p in under("engine") if p.name != "comm.py"], ids=name_of)
def test_only_comm_calls_collectives(path):
    """``comm.broadcast_`` and the like are its methods; ``dist.<collective>`` and imports of one are calls."""
    called = {
        node.attr
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("dist", "distributed", "distributed_c10d")
    }
    assert not called & COLLECTIVES
    assert not {name for name in imports_any(path, "torch.distributed") if name.rpartition(".")[2] in COLLECTIVES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_small(path):
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is {node.end_lineno - node.lineno + 1} lines"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_say_what_they_are_for(path):
    assert ast.get_docstring(parsed(path)), "a file begins with what it does"
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_depends_on_asserts(path):
    """``python -O`` leaves them out: what must hold is raised."""
    lines = [node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
    assert not lines, f"bare asserts in lines {lines}"


@pytest.mark.parametrize("path", [*FILES, *sorted(Path(__file__).parent.rglob("*.py"))], ids=lambda path: path.stem)
def test_files_have_no_banners(path):
    """A file that needs signposts of ``# -----`` is two files."""
    banners = [line for line in path.read_text().splitlines() if re.match(r"\s*#\s*([-=*#~_])\1{2}", line)]
    assert not banners


def test_reading_a_configuration_imports_no_torch():
    """But for the package's own ``__init__``: a launcher can use the files before torch is there."""
    stand_in = f"package = sys.modules['lightning_zero'] = types.ModuleType('x'); package.__path__ = [{str(PACKAGE)!r}]"
    heavy = "{'torch', 'lightning', 'omegaconf', 'hydra'}"
    program = f"import sys, types; {stand_in}; import lightning_zero.config; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
