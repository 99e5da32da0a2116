"""Installed from a wheel, outside the repository: a user's own module and a user's own application."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_hydra import APP, MODULE, ROOT, SHORT, run


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building writes into the folder
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    for name in names:
        if name.split("/")[0] in ("lightning_zero", "conf") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_the_wheel_and_the_source_distribution_have_every_file(installed):
    conf = {str(path.relative_to(ROOT / "conf")) for path in (ROOT / "conf").rglob("*.yaml")}
    assert {str(path.relative_to(installed)) for path in installed.glob("lightning_zero/conf/**/*.yaml")} == {
        f"lightning_zero/conf/{name}" for name in conf
    }
    (wheel,) = installed.parent.glob("*.whl")
    (archive,) = installed.parent.glob("*.tar.gz")
    shutil.unpack_archive(archive, installed.parent / "unpacked", filter="data")
    (source,) = (installed.parent / "unpacked").iterdir()
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    again = installed.parent / "again"
    subprocess.run([sys.executable, "-c", build, str(again)], cwd=source, check=True, capture_output=True)
    assert {*zipfile.ZipFile(again / wheel.name).namelist()} == {*zipfile.ZipFile(wheel).namelist()}


def test_a_users_module_trains(installed, tmp_path):
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "my_module.py").write_text(MODULE)
    words = ["module=my_pkg.my_module:Lit", "zero=stage3", "trainer.devices=2", *SHORT]
    output, code = run("-m", "lightning_zero.train", *words, cwd=tmp_path, path=installed)
    assert code == 0 and "\n2 steps, " in output, output


def test_a_users_application_finds_the_groups(installed, tmp_path):
    imports = "import lightning_zero; print('FROM', lightning_zero.__file__)"
    (tmp_path / "app.py").write_text(APP.format(imports=imports))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("defaults:\n  - zero: stage3\n")
    output, code = run("app.py", "offload=cpu", cwd=tmp_path, path=installed)
    assert code == 0 and "STRATEGY 3 1 cpu" in output and f"FROM {Path(installed)}" in output, output
