"""Makes figures.json: figures of scikit-learn 1.5 for labels and numbers, some of them unknown.

python internal/metrics/testdata/figures.py > internal/metrics/testdata/figures.json
"""

import json

import numpy as np
from sklearn import metrics as m

r = np.random.default_rng(4)
labels, numbers = [], []


def column_mean(f, y, p, known):
    return float(np.mean([f(y[known[:, c], c], p[known[:, c], c]) for c in range(y.shape[1])]))


for n, k, unknown in ((12, 1, 0), (40, 3, 0), (60, 4, 0.2)):
    y = r.integers(0, 2, (n, k))
    y[0], y[1] = 0, 1
    z = (np.round(r.normal(size=(n, k)) * 2) / 2 + y).astype(np.float32)
    z[z == 0] = 0.5
    known = r.random((n, k)) >= unknown
    known[:2] = True
    p = (1 / (1 + np.exp(-z.astype(np.float64)))).astype(np.float32)
    hat = (z > 0).astype(int)
    rows = known.any(1)
    case = {"columns": k, "labels": np.where(known, y, 255).flatten().tolist(),
            "outputs": z.flatten().tolist(),
            "roc_auc": column_mean(m.roc_auc_score, y, p, known),
            "average_precision": column_mean(m.average_precision_score, y, p, known),
            "f1_macro": column_mean(m.f1_score, y, hat, known),
            "f1_micro": m.f1_score(y[known], hat[known]),
            "accuracy": float(np.mean((hat == y)[rows].all(1, where=known[rows]))),
            "log_loss": m.log_loss(y[known], p[known].astype(np.float64))}
    if unknown == 0:
        assert np.isclose(case["f1_micro"], m.f1_score(y, hat, average="micro" if k > 1 else "binary"))
        assert np.isclose(case["f1_macro"], m.f1_score(y, hat, average="macro" if k > 1 else "binary"))
        assert np.isclose(case["accuracy"], m.accuracy_score(y, hat))
        assert np.isclose(case["roc_auc"], m.roc_auc_score(y, p))
        assert np.isclose(case["average_precision"], m.average_precision_score(y, p))
    labels.append(case)

    t = (r.normal(size=(n, k)) * 40 + 150).astype(np.float32)
    o = (t + r.normal(size=(n, k)) * 20).astype(np.float32)
    numbers.append({"columns": k, "targets": [None if not b else float(x) for x, b in
                                              zip(t.flatten(), known.flatten())],
                    "outputs": o.flatten().tolist(),
                    "rmse": column_mean(m.root_mean_squared_error, t, o, known),
                    "mae": column_mean(m.mean_absolute_error, t, o, known),
                    "r2": column_mean(m.r2_score, t, o, known)})

print(json.dumps({"labels": labels, "numbers": numbers}))
