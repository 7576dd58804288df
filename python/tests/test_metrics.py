"""Figures of `eval` beside scikit-learn's, of the scores that `predict` writes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets, metrics, neighbors

import helios

CITESEER = Path(os.environ.get("HELIOS_TESTDATA") or "nowhere") / "citeseer"
APT = Path("/var/lib/apt/lists")
WIDE = os.environ.get("HELIOS_WIDE") == "1"


@pytest.fixture(scope="module", autouse=True)
def own_state(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_STATE", str(tmp_path_factory.mktemp("metrics") / "state"))
        yield


def judged(dataset, binary, tmp_path, **options):
    """Figures of the test by eval, and labels and float64 scores of its nodes."""
    run, out = tmp_path / "run", tmp_path / "scores.npy"
    reads = {"mode": "inmem", "fanout": [-1, -1]}
    helios.train(
        dataset,
        checkpoint=run,
        epochs=4,
        batch_size=256,
        hidden=16,
        lr=0.01,
        binary=binary,
        **reads,
        **options,
    )
    common = (str(dataset), f"--checkpoint={run}", "--mode=inmem", "--fanout=-1,-1")
    (found,) = (e for e in helios.run("eval", *common, binary=binary) if e["event"] == "result")
    helios.run("predict", *common, f"--scores={out}", binary=binary)
    folder = dataset if (dataset / "labels.npy").exists() else dataset / "tasks" / "000"
    test = np.load(folder / "test.npy")
    return (
        found["metrics"],
        np.load(folder / "labels.npy")[test],
        np.load(out)[test].astype(np.float64),
    )


def same(figures, want, tolerance=1e-6):
    """Every figure is the one wanted, and one that is NaN here is absent there."""
    found = {k: v for k, v in figures.items() if k != "class" and isinstance(v, int | float)}
    want = {k: v for k, v in want.items() if not np.isnan(v)}
    assert found == pytest.approx(want, abs=tolerance)


def ranked(y, p):
    """ROC AUC and average precision, NaN where they are undefined."""
    auc = metrics.roc_auc_score(y, p) if 0 < y.sum() < len(y) else np.nan
    return auc, metrics.average_precision_score(y, p) if y.any() else np.nan


def check_each(each, y, hat, p):
    """The figures of classes or labels, whose columns y, hat and p have."""
    assert len(each) == y.shape[1]
    for c, found in enumerate(each):
        of = {"zero_division": np.nan}
        auc, ap = ranked(y[:, c], p[:, c])
        want = {
            "nodes": y[:, c].sum(),
            "precision": metrics.precision_score(y[:, c], hat[:, c], **of),
            "recall": metrics.recall_score(y[:, c], hat[:, c], **of),
            "f1": metrics.f1_score(y[:, c], hat[:, c], **of),
            "roc_auc": auc,
            "average_precision": ap,
        }
        assert found["class"] == c
        same(found, want, 1e-4)


def check_classes(figures, y, scores):
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    hat, classes = scores.argmax(1), scores.shape[1]
    either = np.union1d(y, hat)
    f32 = p.astype(np.float32)
    ranks = np.array([ranked(y == c, f32[:, c]) for c in range(classes)])
    auc, ap = ranks[1] if classes == 2 else np.nanmean(ranks, axis=0)
    confidence, right = f32.max(1), hat == y
    error = 0.0
    bins = np.clip(np.ceil(confidence * np.float64(15)).astype(int) - 1, 0, 14)
    for b in range(15):
        if (bins == b).any():
            error += abs(right[bins == b].sum() - confidence[bins == b].astype(np.float64).sum())
    want = {
        "nodes": len(y),
        "accuracy": metrics.accuracy_score(y, hat),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, hat),
        "f1_micro": metrics.f1_score(y, hat, average="micro"),
        "f1_macro": metrics.f1_score(y, hat, labels=either, average="macro"),
        "log_loss": metrics.log_loss(y, p, labels=range(classes)),
        "roc_auc": auc,
        "average_precision": ap,
        "calibration_error": error / len(y),
    }
    # Probabilities that are equal in float32 here need not be so there.
    same(figures, want, 1e-4)
    assert figures["confusion"] == metrics.confusion_matrix(y, hat, labels=range(classes)).tolist()
    one = np.arange(classes)
    check_each(figures["classes"], y[:, None] == one, hat[:, None] == one, f32)


def test_citeseer(binary, tmp_path):
    if not CITESEER.is_dir():
        pytest.skip("HELIOS_TESTDATA names no folder with citeseer")
    out = tmp_path / "citeseer"
    helios.run("import", "planetoid", f"--in={CITESEER}", f"--out={out}", binary=binary)
    check_classes(*judged(out, binary, tmp_path))


def test_debian(binary, tmp_path):
    if not WIDE:
        pytest.skip("minutes of training: HELIOS_WIDE=1 runs it")
    if not any(APT.glob("*_Packages*")):
        pytest.skip(f"{APT} has no list of packages: run apt-get update")
    out = tmp_path / "debian"
    helios.run("import", "debian", f"--out={out}", binary=binary)
    check_classes(*judged(out, binary, tmp_path))


def nearest(x, k=8):
    near = neighbors.kneighbors_graph(x, k).tocoo()
    return np.stack([near.col, near.row]).astype(np.int64)


def test_classes(binary, tmp_path):
    x, y = datasets.make_classification(1500, 16, n_informative=6, n_classes=4, random_state=4)
    helios.save(tmp_path / "g", x.astype(np.float32), nearest(x), y, binary=binary)
    check_classes(*judged(tmp_path / "g", binary, tmp_path))


def test_two_classes(binary, tmp_path):
    x, y = datasets.make_classification(1500, 16, weights=[0.9], random_state=2)
    helios.save(tmp_path / "g", x.astype(np.float32), nearest(x), y, binary=binary)
    check_classes(*judged(tmp_path / "g", binary, tmp_path, metric="roc-auc"))


def test_labels(binary, tmp_path):
    x, y = datasets.make_multilabel_classification(1500, 16, n_classes=5, random_state=3)
    helios.save(
        tmp_path / "g",
        x.astype(np.float32),
        nearest(x),
        y.astype(np.uint8),
        target="multi-label",
        binary=binary,
    )
    figures, y, scores = judged(tmp_path / "g", binary, tmp_path)
    p, hat = 1 / (1 + np.exp(-scores)), scores > 0
    same(
        figures,
        {
            "nodes": len(y),
            "accuracy": metrics.accuracy_score(y, hat),
            "f1_micro": metrics.f1_score(y, hat, average="micro"),
            "f1_macro": metrics.f1_score(y, hat, average="macro"),
            "roc_auc": metrics.roc_auc_score(y, p),
            "average_precision": metrics.average_precision_score(y, p),
            "log_loss": np.mean([metrics.log_loss(y[:, c], p[:, c]) for c in range(5)]),
        },
    )
    check_each(figures["classes"], y, hat, p.astype(np.float32))
    assert len(figures["curves"]) == 5
    for curve in figures["curves"]:
        area = metrics.auc(curve["fpr"], curve["recall"])
        found = figures["classes"][curve["class"]]["roc_auc"]
        assert area == pytest.approx(found, abs=0.01)


def test_numbers(binary, tmp_path):
    x, y = datasets.load_diabetes(return_X_y=True)
    helios.save(
        tmp_path / "g",
        (20 * x).astype(np.float32),
        nearest(x),
        y,
        target="regression",
        binary=binary,
    )
    figures, y, scores = judged(tmp_path / "g", binary, tmp_path)
    y, scores = y.astype(np.float64).ravel(), scores.ravel()
    want = {
        "nodes": len(y),
        "rmse": metrics.mean_squared_error(y, scores) ** 0.5,
        "mae": metrics.mean_absolute_error(y, scores),
        "r2": metrics.r2_score(y, scores),
    }
    same(figures, want, 1e-4)
