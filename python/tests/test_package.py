"""What is shipped."""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
from pathlib import Path

import pytest

import helios

HERE = Path(__file__).resolve().parents[1]


def test_licence_is_the_repositorys():
    """A copy, since a source distribution holds nothing from outside its folder."""
    assert (HERE / "LICENSE").read_bytes() == (HERE.parent / "LICENSE").read_bytes()


def test_the_installed_package_is_typed_and_licensed():
    assert (Path(helios.__file__).parent / "py.typed").is_file()
    files = importlib.metadata.files("helios-gnn")
    assert any(f.name == "LICENSE" for f in files)
    assert importlib.metadata.version("helios-gnn") == helios.__version__


TYPED = """
import helios
ds = helios.open("g")
helios.loader.NeighborLoader(ds, [1], batch_size=2, num_workers=2, gpu_cache="5%", sampler="labor")
helios.loader.NeighborLoader(ds, [1], gpu_cash="5%")
helios.loader.NeighborLoader(ds, [1], sampler="labour")
helios.NumpyLoader(ds, [1], mode="cpu", presample_epochs="x")
"""


def test_type_checkers_see_typing_errors(tmp_path):
    """Of names, choices and types of heliosctl's options, which the package lists."""
    mypy = pytest.importorskip("mypy.api", reason="no mypy")
    script = tmp_path / "typed.py"
    script.write_text(TYPED)
    said, _, _ = mypy.run(["--strict", f"--cache-dir={tmp_path / 'cache'}", str(script)])
    lines = [line.split("error: ")[1] for line in said.splitlines() if "error: " in line]
    assert len(lines) == 3, said
    for line, word in zip(lines, ("gpu_cash", "labour", "presample_epochs"), strict=True):
        assert word in line


def test_a_new_users_change():
    """From PyG's loader to ours: five lines at most, beside the text at the top."""
    examples = HERE.parent / "examples" / "pytorch"
    code = [
        (examples / f"neighbor_{n}.py").read_text().split('"""', 2)[2].splitlines()
        for n in ("memory", "helios")
    ]
    added = [x for x in difflib.ndiff(*code) if x.startswith("+ ") and x.strip() != "+"]
    assert 0 < len(added) <= 5, added


def test_what_is_public_is_documented():
    for name in helios.__all__:
        thing = getattr(helios, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name
            for method, f in vars(thing).items() if inspect.isclass(thing) else ():
                if not method.startswith("_") and inspect.isfunction(f):
                    assert f.__doc__, f"{name}.{method}"
