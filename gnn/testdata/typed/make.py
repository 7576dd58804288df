"""Writes typed.json: outputs, loss and gradients of models on a small typed graph, by PyTorch Geometric.

The graph has an empty relation, a type without in-edges, self-loops, repeated edges and a hub. Made with
torch 2.2.1 and torch_geometric 2.5.3:  python make.py > typed.json
"""
import json

import torch
from torch_geometric.nn import GATConv, HeteroConv, RGCNConv, SAGEConv

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)  # so that only our own rounding shows
TYPES = {"paper": (40, 5), "author": (25, 3), "venue": (6, 4)}
RELATIONS = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author"),
             ("venue", "prints", "paper"), ("author", "empty", "author")]
HIDDEN, CLASSES, SEEDS = 4, 3, [3, 0, 7, 12, 39, 20]


def edges(r):
    (s, _), (d, _) = TYPES[r[0]], TYPES[r[2]]
    if r[1] == "empty":
        return torch.empty(2, 0, dtype=torch.long)
    src, dst = torch.randint(0, s, (60,)), torch.randint(0, d, (60,))
    dst[dst == 5] = 6                                    # node 5 has no in-edges
    hub = torch.stack([torch.arange(s), torch.full((s,), 3)])
    all_ = [torch.stack([src, dst]), hub, torch.tensor([[1, 1], [7, 7]])]
    if r[1] == "cites":
        all_.append(torch.tensor([[0, 7], [0, 7]]))
    e = torch.cat(all_, 1)
    return e[:, torch.argsort(e[1], stable=True)]


def tensor(x):
    x = x.detach()
    return {"rows": x.shape[0] if x.dim() == 2 else 1, "cols": x.shape[-1], "values": x.flatten().tolist()}


def run(root):
    params = {}

    def parameter(name, *shape):
        params[name] = torch.nn.Parameter(torch.randn(*shape) * 0.5)
        return params[name]

    convs, roots = [], []
    for l in range(2):
        width = (lambda t: TYPES[t][1]) if l == 0 else (lambda t: HIDDEN)
        out = HIDDEN if l == 0 else CLASSES
        roots.append({t: parameter(f"layer{l}.{t}.self.weight", width(t), out) for t in TYPES} if root else {})
        layer = {}
        for r in RELATIONS:
            c = SAGEConv((width(r[0]), width(r[2])), out, aggr="mean", root_weight=False)
            del c.lin_l.weight, c.lin_l.bias
            name = ":".join(r)
            w, b = parameter(f"layer{l}.{name}.neigh.weight", width(r[0]), out), parameter(f"layer{l}.{name}.bias", out)
            c.lin_l.weight, c.lin_l.bias = w.t(), b          # ours are [in, out]
            layer[r] = c
        convs.append(HeteroConv(layer, aggr="sum"))
    x = features
    for l, (conv, own) in enumerate(zip(convs, roots)):
        sums = conv(x, graph)
        out = HIDDEN if l == 0 else CLASSES
        x = {t: sums.get(t, torch.zeros(TYPES[t][0], out)) + (x[t] @ own[t] if root else 0) for t in TYPES}
        if l == 0:
            x = {t: v.relu() for t, v in x.items()}
    logits = x["paper"][SEEDS]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    grads = {k: tensor(torch.zeros_like(v) if v.grad is None else v.grad) for k, v in params.items()}
    return {"model": "rsage", "root": "type" if root else "none", "logits": tensor(logits), "loss": loss.item(),
            "params": {k: tensor(v) for k, v in params.items()}, "grads": grads}


def run_rgcn(bases):
    """All types as one graph whose edges have types; rows are the first three features."""
    first = {"paper": 0, "author": 40, "venue": 65}
    index = torch.cat([graph[r] + torch.tensor([[first[r[0]]], [first[r[2]]]]) for r in RELATIONS], 1)
    kind = torch.cat([torch.full((graph[r].shape[1],), i) for i, r in enumerate(RELATIONS)])
    x = torch.cat([features[t][:, :3] for t in TYPES])
    convs, params, grads = [], {}, {}
    for l, (width, out) in enumerate([(3, HIDDEN), (HIDDEN, CLASSES)]):
        c = RGCNConv(width, out, len(RELATIONS), num_bases=bases or None)
        for p in c.parameters():
            torch.nn.init.normal_(p, std=0.5)
        convs.append(c)
        x = c(x, index, kind)
        if l == 0:
            x = x.relu()
    logits = x[SEEDS]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    for l, c in enumerate(convs):
        for to, of in (params, lambda p: p), (grads, lambda p: p.grad):
            to[f"layer{l}.self.weight"], to[f"layer{l}.bias"] = tensor(of(c.root)), tensor(of(c.bias))
            if bases:
                to[f"layer{l}.bases"] = tensor(of(c.weight).flatten(1))
                to[f"layer{l}.coefficients"] = tensor(of(c.comp))
            else:
                for r, w in zip(RELATIONS, of(c.weight)):
                    to[f"layer{l}." + ":".join(r) + ".neigh.weight"] = tensor(w)
    return {"model": "rgcn", "bases": bases, "dim": 3, "logits": tensor(logits), "loss": loss.item(),
            "params": params, "grads": grads}


def run_rgat(dim):
    """dim: the only features of all types, whose relations then have one matrix for both ends; 0: all of each type."""
    heads, convs, params, grads = 2, [], {}, {}
    x = {t: f[:, :dim] if dim else f for t, f in features.items()}
    for l in range(2):
        layer = {}
        for r in RELATIONS:
            s, d = (x[r[0]].shape[1], x[r[2]].shape[1]) if l == 0 else (HIDDEN, HIDDEN)
            c = GATConv(s if s == d else (s, d), HIDDEN // heads if l == 0 else CLASSES, heads, concat=l == 0,
                        add_self_loops=False)
            for p in c.parameters():
                torch.nn.init.normal_(p, std=0.7)
            layer[r] = c
        convs.append(HeteroConv(layer, aggr="sum"))
        sums = convs[-1](x, graph)
        x = {t: sums.get(t, torch.zeros(TYPES[t][0], HIDDEN)) for t in TYPES}
        if l == 0:
            x = {t: v.relu() for t, v in x.items()}
    logits = x["paper"][SEEDS]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    for l, hetero in enumerate(convs):
        for r in RELATIONS:
            c, name = hetero.convs[r], f"layer{l}." + ":".join(r)
            of = {"weight": c.lin.weight if c.lin is not None else c.lin_src.weight,
                  "att_src": c.att_src, "att_dst": c.att_dst, "bias": c.bias}
            if c.lin is None:
                of["weight_dst"] = c.lin_dst.weight
            for k, p in of.items():
                for to, v in (params, p), (grads, torch.zeros_like(p) if p.grad is None else p.grad):
                    to[f"{name}.{k}"] = tensor(v.t() if k.startswith("weight") else v.flatten(0, -2) if v.dim() > 1 else v)
    return {"model": "rgat", "heads": heads, "dim": dim, "logits": tensor(logits), "loss": loss.item(),
            "params": params, "grads": grads}


graph = {r: edges(r) for r in RELATIONS}
features = {t: torch.randn(n, d) for t, (n, d) in TYPES.items()}
labels = torch.randint(0, CLASSES, (len(SEEDS),))
print(json.dumps({
    "types": [{"name": t, "nodes": n, "dim": d} for t, (n, d) in TYPES.items()],
    "relations": [{"src": list(TYPES).index(s), "name": n, "dst": list(TYPES).index(d),
                   "from": graph[(s, n, d)][0].tolist(), "to": graph[(s, n, d)][1].tolist()} for s, n, d in RELATIONS],
    "features": {t: tensor(x) for t, x in features.items()}, "seeds": SEEDS, "labels": labels.tolist(),
    "hidden": HIDDEN, "classes": CLASSES, "cases": [run(True), run(False), run_rgcn(0), run_rgcn(2), run_rgat(3), run_rgat(0)]}))
