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


class Layers:
    """A model with learned tables, residual connections, normalisations and a head. Normalisation is over the
    nodes of a mini-batch's layer: the seeds of the last one, and their in-neighbours over all relations of the one before."""

    def __init__(self, model, embed=None, featureless=False, bases=0, residual=None, norm=None, share=False, activation="relu",
                 head=None, dim=0, train=False, hidden=HIDDEN, heads=2, layers=2):
        self.case = {k: v for k, v in locals().items() if k != "self" and v} | {"heads": heads if model == "rgat" else 0}
        self.case["embed"] = "".join(f"{t}={d};" for t, d in (embed or {}).items())[:-1]
        self.c, self.params, self.embed, self.dim, self.hidden = dict(locals()), {}, embed or {}, dim, hidden
        for k in ("model", "featureless", "bases", "residual", "norm", "share", "head"):
            setattr(self, k, self.c[k])
        self.act = {"relu": torch.relu, "leaky": torch.nn.functional.leaky_relu, "elu": torch.nn.functional.elu}[activation]
        self.out, self.heads, self.layers = hidden if head else CLASSES, heads, layers

    def new(self, name, *shape, std=0.5):
        self.params[name] = torch.nn.Parameter(torch.randn(*shape) * std)
        return self.params[name]

    def of(self, name, module, **renamed):
        """Takes a PyTorch module's parameters as ours: matrices are [in, out] here."""
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.5)
        for ours, (theirs, turned) in renamed.items():
            self.params[name + ours] = (theirs, turned)

    def conv(self, l, x):
        w = {t: v.shape[1] for t, v in x.items()} if x else {}
        out = self.hidden if l < self.layers - 1 else self.out
        if self.model == "rgcn":
            return self.rgcn(l, x, out)
        layer = {}
        for r in RELATIONS:
            s, d = w[r[0]], w[r[2]]
            if self.model == "rsage":
                c = SAGEConv((s, d), out, aggr="mean", root_weight=False)
                self.of(f"layer{l}." + ":".join(r), c, **{".neigh.weight": (c.lin_l.weight, True), ".bias": (c.lin_l.bias, False)})
            else:
                last = l == self.layers - 1 and not self.head
                c = GATConv(s if s == d else (s, d), out if last else out // self.heads, self.heads, concat=not last, add_self_loops=False)
                lin = (c.lin, c.lin) if c.lin is not None else (c.lin_src, c.lin_dst)
                of = {".weight": (lin[0].weight, True), ".att_src": (c.att_src, None), ".att_dst": (c.att_dst, None), ".bias": (c.bias, False)}
                if c.lin is None:
                    of[".weight_dst"] = (lin[1].weight, True)
                self.of(f"layer{l}." + ":".join(r), c, **of)
            layer[r] = c
        sums = HeteroConv(layer, aggr="sum")(x, graph)
        sums = {t: sums.get(t, torch.zeros(n, out)) for t, (n, _) in TYPES.items()}
        if self.model == "rsage":
            own = self.new(f"layer{l}.self.weight", w["paper"], out) if self.share else None
            sums = {t: v + x[t] @ (own if self.share else self.new(f"layer{l}.{t}.self.weight", w[t], out)) for t, v in sums.items()}
        return sums

    def rgcn(self, l, x, out):
        first, total = {"paper": 0, "author": 40, "venue": 65}, 71
        index = torch.cat([graph[r] + torch.tensor([[first[r[0]]], [first[r[2]]]]) for r in RELATIONS], 1)
        kind = torch.cat([torch.full((graph[r].shape[1],), i) for i, r in enumerate(RELATIONS)])
        bare = self.featureless and l == 0
        x = None if bare else torch.cat([x[t] for t in TYPES])
        c = RGCNConv(total if bare else x.shape[1], out, len(RELATIONS), num_bases=self.bases or None)
        of = {"self.weight": (c.root, False), "bias": (c.bias, False)}
        if self.bases:
            of |= {"bases": (c.weight, "flat"), "coefficients": (c.comp, False)}
        elif bare:
            of["neigh.weight"] = (c.weight, "flat")
        self.of(f"layer{l}.", c, **of)
        if not self.bases and not bare:
            for i, r in enumerate(RELATIONS):
                self.params[f"layer{l}." + ":".join(r) + ".neigh.weight"] = (c.weight, i)
        z = c(x, index, kind)
        return {t: z[first[t]:first[t] + n] for t, (n, _) in TYPES.items()}

    def normalise(self, name, x, rows):
        """Normalises the rows of several types together."""
        gamma, beta = self.new(name + "norm.gamma", x[0].shape[1]), self.new(name + "norm.beta", x[0].shape[1])
        if self.norm == "layer":
            return [torch.nn.functional.layer_norm(v, v.shape[1:], gamma, beta) for v in x]
        all_ = torch.cat([v[r] for v, r in zip(x, rows)])
        mean, var = (all_.mean(0), all_.var(0, unbiased=False)) if len(all_) else (torch.zeros(()), torch.ones(()))
        return [(v - mean) / (var + 1e-5).sqrt() * gamma + beta for v in x]

    def run(self):
        x = {t: f[:, :self.dim] if self.dim else f for t, f in features.items()}
        for t, d in self.embed.items():
            x[t] = self.new(f"embed.{t}.weight", TYPES[t][0], d)
        # the destinations of the last layer, and of the one before
        seeds = {"paper": SEEDS, "author": [], "venue": []}
        before = {t: set(v) for t, v in seeds.items()}
        for r in RELATIONS:
            before[r[0]] |= {int(j) for j, i in graph[r].t() if int(i) in seeds[r[2]]}
        dsts = [{t: sorted(v) for t, v in before.items()}, seeds]
        for l in range(self.layers):
            sums = self.conv(l, None if self.featureless and l == 0 else x)
            if self.residual:
                for k, t in enumerate(TYPES):
                    if self.residual == "linear" or x[t].shape[1] != sums[t].shape[1]:
                        name = f"layer{l}." + ("" if self.share else t + ".")
                        if k == 0 or not self.share:
                            p = self.new(name + "residual.weight", x[t].shape[1], sums[t].shape[1])
                            b = self.new(name + "residual.bias", sums[t].shape[1]) if self.residual == "linear" else 0
                        sums[t] = sums[t] + x[t] @ p + b
                    else:
                        sums[t] = sums[t] + x[t]
            if l < self.layers - 1 or self.head == "mlp":
                if self.norm:
                    names = list(TYPES)
                    if self.share:
                        sums = dict(zip(names, self.normalise(f"layer{l}.", [sums[t] for t in names], [dsts[l][t] for t in names])))
                    else:
                        sums = {t: self.normalise(f"layer{l}.{t}.", [sums[t]], [dsts[l][t]])[0] for t in names}
                sums = {t: self.act(v) for t, v in sums.items()}
            x = sums
        out = x["paper"][SEEDS]
        if self.head == "linear":
            out = out @ self.new("head.weight", self.hidden, CLASSES) + self.new("head.bias", CLASSES)
        if self.head == "mlp":
            out = out @ self.new("head.0.weight", self.hidden, self.hidden) + self.new("head.0.bias", self.hidden)
            out = torch.relu(torch.nn.functional.batch_norm(out, None, None, self.new("head.norm.gamma", self.hidden),
                                                            self.new("head.norm.beta", self.hidden), training=True))
            out = out @ self.new("head.1.weight", self.hidden, CLASSES) + self.new("head.1.bias", CLASSES)
        loss = torch.nn.functional.cross_entropy(out, labels)
        loss.backward()
        return self.case | {"logits": tensor(out), "loss": loss.item(), "params": self.tensors(lambda p: p),
                            "grads": self.tensors(lambda p: torch.zeros_like(p) if p.grad is None else p.grad)}

    def tensors(self, of):
        all_ = {}
        for name, p in self.params.items():
            how = False
            if isinstance(p, tuple):
                p, how = p
            p = of(p)
            if how is None:
                p = p.flatten(0, -2)
            elif how == "flat":
                p = p.flatten(1)
            elif how is True:
                p = p.t()
            elif how is not False:
                p = p[how]
            all_[name] = tensor(p)
            all_[name]["values"] = [float(f"{v:.9g}") for v in all_[name]["values"]]
        return all_


LAYERS = [
    Layers("rsage", embed={"venue": 3}),
    Layers("rsage", embed={"author": 7, "venue": 2}, residual="plain"),
    Layers("rgat", embed={"author": 5, "venue": 5}, residual="linear"),
    Layers("rgat", embed={"author": 2, "venue": 7}),
    Layers("rgcn", embed={"paper": 3, "author": 3, "venue": 3}, bases=2),
    Layers("rgcn", featureless=True, bases=2),
    Layers("rgcn", featureless=True),
    Layers("rsage", norm="layer", activation="leaky", residual="linear", head="linear"),
    Layers("rsage", norm="batch", head="mlp", train=True),
    Layers("rsage", norm="batch", share=True, dim=3, residual="linear", head="mlp", activation="elu", train=True),
    Layers("rgcn", dim=3, norm="layer", residual="plain", bases=2),
    # MLPerf's model of IGBH, small
    Layers("rgat", dim=3, hidden=8, heads=4, layers=3, activation="leaky", head="linear"),
    Layers("rgat", dim=3, head="linear", activation="leaky", residual="plain", share=True),
]

graph = {r: edges(r) for r in RELATIONS}
features = {t: torch.randn(n, d) for t, (n, d) in TYPES.items()}
labels = torch.randint(0, CLASSES, (len(SEEDS),))
print(json.dumps({
    "types": [{"name": t, "nodes": n, "dim": d} for t, (n, d) in TYPES.items()],
    "relations": [{"src": list(TYPES).index(s), "name": n, "dst": list(TYPES).index(d),
                   "from": graph[(s, n, d)][0].tolist(), "to": graph[(s, n, d)][1].tolist()} for s, n, d in RELATIONS],
    "features": {t: tensor(x) for t, x in features.items()}, "seeds": SEEDS, "labels": labels.tolist(),
    "hidden": HIDDEN, "classes": CLASSES, "cases": [run(True), run(False), run_rgcn(0), run_rgcn(2), run_rgat(3), run_rgat(0)] + [case.run() for case in LAYERS]}))
