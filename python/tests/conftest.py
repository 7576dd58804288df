"""Fixtures: fake daemons, the real binary, datasets."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakeserver import FakeServer, Peer

import helios

# A shell's background job ignores Ctrl-C, and so do the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Daemons of these tests listen in the state folder that a test names.
os.environ.pop("XDG_RUNTIME_DIR", None)

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Callable[..., FakeServer]]:
    """Starts fake daemons of a subclass of Peer, which end with the test."""
    servers: list[FakeServer] = []

    def start(peer: type[Peer] = Peer) -> FakeServer:
        servers.append(FakeServer(tmp_path / f"s{len(servers)}", peer))
        return servers[-1]

    yield start
    for s in servers:
        s.close()


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """heliosctl: $HELIOSCTL, or built from this checkout."""
    named = os.environ.get("HELIOSCTL")
    if named:
        return helios._daemon.find_binary(named)
    go = shutil.which("go")
    if go is None:
        pytest.skip("set HELIOSCTL to heliosctl's binary, or install Go to build it")
    out = tmp_path_factory.mktemp("bin") / "heliosctl"
    subprocess.run(
        [go, "build", "-trimpath", "-o", str(out), "./cmd/heliosctl"],
        cwd=REPOSITORY,
        env={**os.environ, "CGO_ENABLED": "0"},
        check=True,
    )
    return str(out)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fake libcuda: $HELIOS_FAKE_LIBCUDA, or built from this checkout."""
    named = os.environ.get("HELIOS_FAKE_LIBCUDA")
    if named:
        return named
    go = shutil.which("go")
    if go is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("the fake libcuda is built by Go and a C++ compiler, or HELIOS_FAKE_LIBCUDA")
    out = tmp_path_factory.mktemp("libcuda")
    subprocess.run(
        [go, "-C", "tools", "run", "-trimpath", "./fakelib", "-o", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "CGO_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return str(out / "libcuda.so.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory, binary):
    """Makes and opens a dataset of edges, whose row v is [v, v, …]."""
    opened: list[helios.Dataset] = []
    with pytest.MonkeyPatch.context() as patch:

        def make(edges, nodes, labels=None, dim=4, splits=None):
            folder = tmp_path_factory.mktemp("made")
            patch.setenv("HELIOS_STATE", str(folder / "state"))
            x = np.repeat(np.arange(nodes, dtype=np.float32)[:, None], dim, axis=1)
            y = np.arange(nodes) % 3 if labels is None else labels
            if splits is None:
                at = np.arange(nodes)
                splits = {"train": at[: nodes - 2], "val": at[-2:-1], "test": at[-1:]}
            out, image = folder / "g", folder / "ssd.img"
            helios.save(out, x, np.asarray(edges), y, splits, binary=binary)
            helios.run("bind-ssds", f"--proxy={image}", "--size=16MiB", binary=binary)
            helios.run("load", str(out), binary=binary)
            opened.append(helios.open(out, binary=binary))
            return opened[-1]

        yield make
        for ds in opened:
            ds.close()
