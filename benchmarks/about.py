"""Where a result comes from: the machine, and the versions of what was run."""

import importlib
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "lightning", "lightning_zero")


def machine() -> dict[str, str | int]:
    """Model of the CPU, and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": _cpu(), "cores": cores, "system": platform.system()}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(*more: str) -> dict[str, str | None]:
    """Versions of Python, of the packages, and the commit of this checkout, where there is one."""
    found = {name: importlib.import_module(name).__version__ for name in (*PACKAGES, *more)}
    return {"python": platform.python_version(), **found, "commit": _commit()}


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
