"""The wheels that tools/wheels.sh built into the folder HELIOS_WHEELS."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

WHEELS = Path(os.environ.get("HELIOS_WHEELS") or "nowhere").absolute()
has_pyg = importlib.util.find_spec("torch_geometric") is not None

pytestmark = pytest.mark.skipif(
    not WHEELS.is_dir(), reason="HELIOS_WHEELS names no folder of wheels (tools/wheels.sh)"
)


def wheel(start: str) -> Path:
    (found,) = (
        p for p in WHEELS.glob(f"{start}-*.whl") if p.stem.endswith(("any", platform.machine()))
    )
    return found


def bare() -> dict[str, str]:
    """An environment in which nothing names heliosctl."""
    gone = ("HELIOSCTL", "PYTHONPATH", "HELIOS_STATE")
    kept = {k: v for k, v in os.environ.items() if k not in gone}
    return kept | {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def test_each_file_is_as_recorded():
    for path in WHEELS.glob("*.whl"):
        with zipfile.ZipFile(path) as z:
            names = set(z.namelist())
            (record,) = (n for n in names if n.endswith(".dist-info/RECORD"))
            seen = {record}
            for line in z.read(record).decode().splitlines():
                name, digest, _ = line.rsplit(",", 2)
                if digest:
                    got = base64.urlsafe_b64encode(hashlib.sha256(z.read(name)).digest())
                    assert digest == "sha256=" + got.decode().rstrip("=")
                    seen.add(name)
            assert seen == names
            assert {i.date_time for i in z.infolist()} == {(2020, 1, 1, 0, 0, 0)}


def test_the_binary_is_of_the_tags_processor():
    machines = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF
    for path in WHEELS.glob("heliosctl-*.whl"):
        with zipfile.ZipFile(path) as z:
            (name,) = (n for n in z.namelist() if n.endswith("/scripts/heliosctl"))
            head = z.open(name).read(20)
        assert head[:4] == b"\x7fELF"
        assert int.from_bytes(head[18:], "little") == machines[path.stem.split("_", 3)[3]]


def test_the_sdist_builds_the_wheel(tmp_path):
    """From the archive alone, to the byte."""
    (archive,) = WHEELS.glob("helios_gnn-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    command = [os.environ["HATCHLING"], "build", "-t", "wheel", "-d", tmp_path / "out"]
    made = {**os.environ, "SOURCE_DATE_EPOCH": "1577836800"}
    subprocess.run(command, cwd=folder, env=made, check=True, capture_output=True)
    (built,) = (tmp_path / "out").iterdir()
    assert built.read_bytes() == wheel("helios_gnn").read_bytes()


@pytest.mark.skipif(
    importlib.util.find_spec("auditwheel") is None, reason="auditwheel is not installed"
)
def test_the_tag_is_what_auditwheel_finds(tmp_path):
    """Go's linker leaves an empty section that auditwheel stumbles over, so a copy lacks it."""
    path = wheel("heliosctl")
    copy = tmp_path / path.name
    with zipfile.ZipFile(path) as z, zipfile.ZipFile(copy, "w") as out:
        for i in z.infolist():
            data = z.read(i).replace(b".gnu.version_r\0", b".gnu.version_x\0")
            out.writestr(i.filename, data, compress_type=zipfile.ZIP_STORED)
    said = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", copy],
        check=False,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    tag = path.stem.rsplit("-", 1)[1]
    assert f'"{tag}"' in re.sub(r"\s+", " ", said.stdout)


def test_an_empty_environment(tmp_path):
    """Both wheels and NumPy, and no word of heliosctl: the demonstration runs."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    python = env / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if has_pyg:
        # PyTorch is several GB: it and NumPy are this environment's; the wheels are the new one's.
        (packages,) = (env / "lib").glob("python*/site-packages")
        (packages / "theirs.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip += ["--no-index", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, wheel("helios_gnn"), wheel("heliosctl")], env=bare(), check=True)

    def run(*args):
        done = subprocess.run(
            [python, *args], check=False, capture_output=True, text=True, env=bare(), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import helios._daemon as d; print(helios.__file__, d.find_binary())"
    here, binary = run("-c", "import helios; " + code).split()
    assert Path(here).is_relative_to(env)
    assert Path(binary) == env / "bin" / "heliosctl"
    if not has_pyg:
        said = run("-m", "helios.demo", "--graph", "made", "--nodes", "5000", "--epochs", "2")
        assert re.search(r"epoch 2: \d+ batches, \d+ rows", said), said
        return
    # On a machine of Debian's: its packages, by PyG's SAGE; elsewhere a graph that is made up.
    began = time.monotonic()
    said = run("-m", "helios.demo", "--epochs", "3")
    losses = [float(x) for x in re.findall(r"epoch \d+: loss ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    accuracy = float(said.split()[-1])
    assert accuracy > 0.5, said
    print(f"demonstration: accuracy {accuracy} in {time.monotonic() - began:.1f} s")
