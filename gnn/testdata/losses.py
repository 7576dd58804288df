"""Makes losses.json: losses and gradients of PyTorch 2.2, in float64, for small random cases.

python gnn/testdata/losses.py > gnn/testdata/losses.json
"""

import json

import torch
import torch.nn.functional as F

torch.manual_seed(3)
cases = []


def draw(rows, cols):
    return torch.randn(rows, cols, dtype=torch.float32).double().mul(3).float().double()


def add(name, loss, outputs, targets, weights=None, smoothing=0.0):
    outputs.requires_grad_()
    value = loss(outputs)
    value.backward()
    cases.append({
        "loss": name, "rows": outputs.shape[0], "cols": outputs.shape[1],
        "outputs": outputs.detach().flatten().tolist(),
        "targets": [None if x != x else x for x in targets.double().flatten().tolist()],
        "weights": [] if weights is None else weights.tolist(), "smoothing": smoothing,
        "want": value.item(), "grad": outputs.grad.flatten().tolist(),
    })


for rows, cols in ((1, 2), (70, 2), (3, 34)):
    labels = torch.randint(-1, cols, (rows,))
    labels[0] = 1
    weights = torch.rand(cols).float() + 0.5
    for w in (None, weights):
        for e in (0.0, 0.125):
            add("softmax", lambda z, w=w, e=e: F.cross_entropy(
                z, labels, None if w is None else w.double(), ignore_index=-1, label_smoothing=e),
                draw(rows, cols), labels, w, e)

for rows, cols in ((1, 1), (70, 2), (3, 34)):
    bits = torch.randint(0, 2, (rows, cols)).double()
    bits[torch.rand(rows, cols) < 0.2] = torch.nan
    bits[0, 0] = 1
    known = ~bits.isnan()
    weights = torch.rand(cols).float() * 4
    for w in (None, weights):
        for e in (0.0, 0.25):
            each = None if w is None else w.double().expand(rows, cols)[known]
            to = (bits * (1 - e) + e / 2)[known]
            add("bce", lambda z, to=to, each=each: F.binary_cross_entropy_with_logits(
                z[known], to, pos_weight=each), draw(rows, cols), bits, w, e)

    numbers = draw(rows, cols)
    numbers[torch.rand(rows, cols) < 0.2] = torch.nan
    numbers[0, 0] = 0.5
    known = ~numbers.isnan()
    for name, loss in (("mse", F.mse_loss), ("mae", F.l1_loss), ("huber", F.huber_loss)):
        add(name, lambda z, loss=loss: loss(z[known], numbers[known]), draw(rows, cols), numbers)

print(json.dumps({"torch": torch.__version__, "cases": cases}))
