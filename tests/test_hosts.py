"""Two hosts: ``torchrun --nnodes 2`` in two network namespaces with a cable between them."""

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from forked import TORCHRUN, Program
from harness import run_ranks
from hosts_fit import fit_on_rank
from test_strategy import zero

SCRIPT = Path(__file__).with_name("hosts_fit.py")
NAMES = tuple(f"zero_{end}{os.getpid()}" for end in "ab")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29611"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Two namespaces, each with one end of a cable and an address of its own."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts on one are network namespaces, which the ip command makes (package iproute2)")
    try:
        ip("netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        if "ermission denied" not in error.stderr and "not permitted" not in error.stderr:
            raise
        pytest.skip("two hosts on one are network namespaces, which this user may not make (root may)")
    try:
        ip("netns", "add", NAMES[1])
        ip("link", "add", "zero0", "netns", NAMES[0], "type", "veth", "peer", "name", "zero1", "netns", NAMES[1])
        for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"zero{number}")
            ip("-n", name, "link", "set", f"zero{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMES:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def result(programs):
    said = [program.end() for program in programs]
    assert all(code == 0 for _, code in said), said
    (line,) = [line for output, _ in said for line in output.splitlines() if "RESULT" in line]
    return json.loads(line.split("RESULT")[1])


def apart(stage, folder):
    """One rank on each host."""
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", PORT]
    return [
        Program(
            *(*TORCHRUN, *nodes, "--node-rank", str(number), str(SCRIPT), str(stage), "2"),
            cwd=folder,
            network=name,
            GLOO_SOCKET_IFNAME=f"zero{number}",
        )
        for number, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_two_hosts_are_as_one(hosts, stage, tmp_path):
    together = run_ranks(fit_on_rank, 2, zero(stage))[0]
    assert result(apart(stage, tmp_path)) == together
