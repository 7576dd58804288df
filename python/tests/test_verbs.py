"""Calls of the binary, against a script that tells how it was called."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

import numpy as np
import pytest

import helios

TELL = """
import json, sys
print(json.dumps({"event": "epoch", "epoch": 1}))
for event in ("run", "result", "compare"):
    print(json.dumps({"event": event, "argv": sys.argv[1:]}))
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "heliosctl"
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write


def test_options_become_flags(script, tmp_path):
    b = script(TELL)
    got = helios.train(
        tmp_path, gpu_cache="5%", epochs=2, resume=True, fanout=[5, 3], timeline=None, binary=b
    )
    flags = ["--gpu-cache=5%", "--epochs=2", "--resume=true", "--fanout=5,3", "--json"]
    assert got["argv"] == ["train", str(tmp_path), *flags]
    got = helios.compare("g", modes=("cpu", "mmap"), binary=b)
    assert got["argv"] == ["compare", "g", "--modes=cpu,mmap", "--json"]
    assert len(got["runs"]) == 1
    got = helios.bench("io", "g", ssds="a", binary=b)
    assert got[-1]["argv"] == ["bench", "io", "g", "--ssds=a", "--json"]
    assert helios.bench("sample", binary=b)[-1]["argv"] == ["bench", "sample", "--json"]
    got = helios.import_("npy", tmp_path / "o", in_=["a", "b"], undirected=True, binary=b)
    assert got["argv"][:3] == ["import", "npy", f"--out={tmp_path / 'o'}"]
    assert got["argv"][3:] == ["--in=a,b", "--undirected=true", "--json"]
    assert helios.run("ssds", binary=b)[0] == {"event": "epoch", "epoch": 1}
    with pytest.raises(helios.UsageError, match="hidden"):
        helios.train("g", hidden=object(), binary=b)


def test_errors(script):
    b = script(
        "import json, sys; print(json.dumps({'event': 'error', 'error': 'the disk is full'})); "
        "sys.exit(5)"
    )
    with pytest.raises(helios.DeviceError, match=r"^the disk is full$"):
        helios.train("g", binary=b)
    b = script("import sys; print('oh no', file=sys.stderr); sys.exit(4)")
    with pytest.raises(helios.RefusedError, match="oh no"):
        helios.run("load", binary=b)
    b = script("print('{broken')")
    with pytest.raises(helios.HeliosError, match="broken"):
        helios.run("load", binary=b)
    b = script("print('hello')")
    with pytest.raises(helios.HeliosError, match="no result"):
        helios.train("g", binary=b)


TABLE = """
import json, sys
for event in ("run", "run", "result", "compare"):
    print(json.dumps({"event": event, "io": {"reads": 7}, "epochs": [{"epoch": 1}, {"epoch": 2}]}))
"""


def test_frames(script):
    pytest.importorskip("pandas", reason="pandas is not installed")
    b = script(TABLE)
    frame = helios.train("g", binary=b).frame()
    assert frame.to_dict("list") == {"epoch": [1, 2]}
    assert frame.attrs == {"event": "result", "io": {"reads": 7}}
    frame = helios.compare("g", binary=b).frame()
    assert frame["event"].tolist() == ["run", "run"]
    assert (frame.attrs["event"], "runs" in frame.attrs) == ("compare", False)
    frame = helios.bench("io", binary=b).frame()
    assert frame["io.reads"].tolist() == [7] * 4


def test_frames_want_pandas(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    got = helios.train("g", binary=script(TABLE))
    assert got["epochs"] == [{"epoch": 1}, {"epoch": 2}]
    with pytest.raises(helios.CapabilityError, match="pip install pandas"):
        got.frame()


SAVE = """
import json, os, sys
folder = sys.argv[3].removeprefix("--in=")
import numpy as np
held = {n: [str(a.dtype), a.tolist()] for n in sorted(os.listdir(folder))
        for a in [np.load(os.path.join(folder, n))]}
print(json.dumps({"event": "result", "argv": sys.argv[1:], "held": held}))
"""


def test_save_writes_arrays(script, tmp_path):
    b = script(SAVE)
    labels = tmp_path / "given.npy"
    np.save(labels, np.array([0, 1]))
    got = helios.save(
        tmp_path / "out",
        np.array([[1.5, 2], [3, 4]], np.float32),
        [[0, 1], [1, 0]],
        labels,
        {"train": np.array([True, False]), "val": [1], "test": [0]},
        undirected=True,
        binary=b,
    )
    assert got["held"] == {
        "edge_index.npy": ["int64", [[0, 1], [1, 0]]],
        "features.npy": ["float32", [[1.5, 2], [3, 4]]],
        "labels.npy": ["int64", [0, 1]],
        "test.npy": ["int64", [0]],
        "train.npy": ["bool", [True, False]],
        "val.npy": ["int64", [1]],
    }
    assert got["argv"][3:] == [f"--out={tmp_path / 'out'}", "--undirected=true", "--json"]
    assert sorted(os.listdir(tmp_path)) == ["given.npy", "heliosctl"]


def test_save_refuses(script, tmp_path):
    b = script(SAVE)
    x, e, y = np.zeros((2, 1), np.float32), [[0], [1]], [0, 0]
    with pytest.raises(helios.UsageError, match="valid"):
        helios.save(tmp_path / "o", x, e, y, {"valid": [1]}, binary=b)
    with pytest.raises(helios.UsageError, match="no file"):
        helios.save(tmp_path / "o", x, e, tmp_path / "nothing.npy", binary=b)
    with pytest.raises(helios.UsageError, match="no folder"):
        helios.save(tmp_path / "a" / "o", x, e, y, binary=b)
    ragged = [[0, 1], [2]]
    wrong = {"labels": (x, e, [None, "a"]), "features": (ragged, e, y)}
    wrong["edge_index"] = (x, ragged, y)
    with contextlib.suppress(ImportError):
        import torch

        sparse = torch.eye(2).to_sparse()
        wrong |= {"features is": (sparse, e, y), "edge_index is": (x, sparse, y)}
        wrong["labels is"] = (x, e, torch.empty(2, device="meta"))
    for name, arrays in wrong.items():
        with pytest.raises(helios.UsageError, match=f"{name}.* no array of numbers.*; give"):
            helios.save(tmp_path / "o", *arrays, binary=b)
    assert os.listdir(tmp_path) == ["heliosctl"]


EPOCHS = """
import json, sys, time
for n in (1, 2):
    print(json.dumps({"event": "epoch", "epoch": n, "loss": 1 / n, "mode": "cpu", "resumed": False,
                      "metrics": {"f1-macro": 0.5 * n, "none": None}}), flush=True)
    sys.stdin.read()
print(json.dumps({"event": "result", "epochs": []}))
"""


def test_on_epoch(script):
    seen = []
    helios.train("g", binary=script(EPOCHS), on_epoch=seen.append)
    assert [(r["epoch"], r["loss"], "event" in r) for r in seen] == [(1, 1, False), (2, 0.5, False)]
    logged = []
    on_epoch = helios.scalars(lambda *figure: logged.append(figure))
    helios.train("g", binary=script(EPOCHS), on_epoch=on_epoch)
    assert logged == [
        ("loss", 1, 1),
        ("metrics/f1-macro", 0.5, 1),
        ("loss", 0.5, 2),
        ("metrics/f1-macro", 1, 2),
    ]


def test_on_epoch_stops(script, tmp_path):
    told = tmp_path / "told"
    b = script(f"""
import json, signal, sys, time
def stop(*_):
    open({str(told)!r}, "w").close()
    sys.exit(6)
signal.signal(signal.SIGINT, stop)
print(json.dumps({{"event": "epoch", "epoch": 1}}), flush=True)
time.sleep(60)
""")

    def stop(record):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        helios.train("g", binary=b, on_epoch=stop)
    assert told.exists()


def test_tensorboard(script, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="no TensorBoard")
    with tensorboard.SummaryWriter(str(tmp_path / "runs")) as writer:
        helios.train("g", binary=script(EPOCHS), on_epoch=helios.scalars(writer.add_scalar))
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(1, 1.0), (2, 0.5)]


def test_mlflow(script, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="no MLflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    with mlflow.start_run() as run:
        helios.train("g", binary=script(EPOCHS), on_epoch=helios.scalars(mlflow.log_metric))
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]


def test_wandb(script, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="no W&B")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path)) as run:
        helios.train("g", binary=script(EPOCHS), on_epoch=run.log)
        assert run.summary["loss"] == 0.5
