"""Several processes by torchrun and DDP: one order, equal losses, kills, another number of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import helios

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torch_geometric", reason="PyG is not installed")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pytorch" / "ddp.py"
WIDE = os.environ.get("HELIOS_WIDE") == "1"
EPOCHS = 3
WIDER = [(4, "jk"), *((r, m) for r in (2, 4) for m in ("sage", "gat", "gatv2"))]
# The first has every attempt of torchrun make a store of its own: that of the agent still has the
# addresses of workers that died, and the next ones try to reach them.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


class Daemon:
    """heliosctl serve, begun anew when it is killed."""

    def __init__(self, binary: str, path: Path) -> None:
        self.binary, self.path = binary, path
        self.ends = threading.Event()
        self.up = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.keeper = threading.Thread(target=self._keep)
        self.keeper.start()
        assert self.up.wait(60)

    def _keep(self) -> None:
        while not self.ends.is_set():
            command = [self.binary, "serve", "--socket", str(self.path), "--json"]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                self.process = process
                process.stdout.readline()  # it listens
                self.starts += 1
                self.up.set()
                process.wait()

    def close(self) -> None:
        self.ends.set()
        self.process.send_signal(signal.SIGINT)
        self.keeper.join(30)


@pytest.fixture(scope="module")
def site(tmp_path_factory, binary):
    folder = tmp_path_factory.mktemp("ddp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(folder / "state"))
        graph = folder / "g"
        helios.run("generate", "--nodes=3000", "--dim=16", "--classes=4", f"--out={graph}",
                   binary=binary)  # fmt: skip
        helios.run("bind-ssds", f"--proxy={folder / 'ssd.img'}", "--size=32MiB", binary=binary)
        helios.run("load", graph, binary=binary)
        daemon = Daemon(binary, folder / "s.sock")
        yield folder, daemon
        daemon.close()


def begin(site, ranks, *more, restarts=0, output=subprocess.PIPE):
    folder, daemon = site
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.2", EXAMPLE, folder / "g", "--socket", daemon.path]
    # Batches of 97: the last step of an epoch has fewer, and its last batch fewer seeds.
    command += ["--epochs", EPOCHS, "--batch-size", "97", *more]
    return subprocess.Popen(
        [str(c) for c in command],
        stdout=output,
        stderr=output if output is subprocess.PIPE else subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )


def finish(process) -> str:
    try:
        said, err = process.communicate(timeout=400)
    finally:
        end(process)
    assert process.returncode == 0, err
    return said


def losses(said: str) -> dict[int, float]:
    return {int(e): float(x) for e, x in re.findall(r"epoch (\d+): loss ([\d.]+)", said)}


def end(process) -> None:
    """Kills torchrun and its workers, each of which has a session of its own."""
    for pid in [*workers(process), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def workers(process) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == process.pid:
                found.append(int(stat.parent.name))
    return sorted(found)


def wait_for(done, process, what) -> None:
    deadline = time.monotonic() + 250
    while not done():
        assert process.poll() is None, f"it ended before {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def one(site):
    """The losses of one process, by model."""
    known: dict[str, dict[int, float]] = {}

    def of(model="sage"):
        if model not in known:
            known[model] = losses(finish(begin(site, 1, "--model", model)))
            got = [known[model][e + 1] for e in range(EPOCHS)]
            assert got[-1] < 0.8 * got[0], got
        return known[model]

    return of


@pytest.mark.parametrize(
    ("ranks", "model"),
    [(2, "jk"), *(WIDER if WIDE else [])],
)
def test_losses_are_those_of_one(site, one, ranks, model):
    got = losses(finish(begin(site, ranks, "--model", model)))
    assert got == pytest.approx(one(model), abs=2e-5)


def test_another_number_of_ranks(site, one, tmp_path):
    """Two are killed after a checkpoint; four go on, behind it."""
    saved = tmp_path / "c"
    process = begin(site, 2, "--checkpoint", saved, "--save-every", "3", "--model", "jk")
    wait_for(saved.exists, process, "the first checkpoint")
    end(process)
    said = finish(begin(site, 4, "--checkpoint", saved, "--model", "jk"))
    assert "going on at batch" in said
    got = losses(said)
    assert EPOCHS in got
    assert got == pytest.approx({e: one("jk")[e] for e in got}, abs=2e-5)


@pytest.mark.parametrize("victim", ["rank", *(["daemon"] if WIDE else [])])
def test_kills(site, one, tmp_path, victim):
    """torchrun begins all ranks anew, which go on behind the checkpoint."""
    folder, daemon = site
    saved, log = tmp_path / "c", tmp_path / "log"
    more = ("--checkpoint", saved, "--save-every", "1", "--model", "jk")
    with log.open("w") as output:
        process = begin(site, 2, *more, restarts=5, output=output)
        wait_for(saved.exists, process, "the first checkpoint")
        starts = daemon.starts
        print(f"killing the {victim}")
        if victim == "daemon":
            daemon.process.kill()
        else:
            os.kill(workers(process)[1], signal.SIGKILL)
        try:
            process.wait(400)
        finally:
            end(process)
    said = log.read_text()
    assert process.returncode == 0, said
    assert daemon.starts == starts + (victim == "daemon")
    assert "going on at batch" in said
    got = losses(said)
    assert EPOCHS in got
    assert got == pytest.approx({e: one("jk")[e] for e in got}, abs=2e-5)


PLAIN = """
import os, sys, torch, torch.distributed as dist
import helios
from helios.loader import NeighborLoader

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
with helios.open(sys.argv[1], binary=sys.argv[2]) as ds:
    nodes = torch.arange(485)  # 5 batches: of 3 ranks the last lacks one
    loader = NeighborLoader(
        ds, [3, 2], nodes, batch_size=97, shuffle=True, rank=rank, world_size=world,
        drop_last=sys.argv[3] == "drop_last",
    )
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seen = []
    for epoch in range(2):
        batches = 0
        for batch in loader:
            out = ddp(batch.x)[: batch.batch_size]
            torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
            seen.append(batch.index)
        assert batches == len(loader)
    print(f"rank {rank} of {world}: {seen}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("ranks", "more", "want"),
    [
        (1, "", [[0, 1, 2, 3, 4] * 2]),
        (2, "", [[0, 2, 4] * 2, [1, 3, 1] * 2]),
        (3, "", [[0, 3] * 2, [1, 4] * 2, [2, 2] * 2]),
        (3, "drop_last", [[0] * 2, [1] * 2, [2] * 2]),
    ],
)
def test_a_plain_loop_ends(site, tmp_path, ranks, more, want):
    """DDP without helios.steps: as many batches for each rank, whatever does not go round."""
    folder, daemon = site
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), str(folder / "g"), daemon.binary]
    done = subprocess.run(
        [*command, more], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank, batches in enumerate(want):
        assert f"rank {rank} of {ranks}: {batches}" in done.stdout
