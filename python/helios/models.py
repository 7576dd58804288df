"""heliosctl's models as modules of PyG's and DGL's own layers, with a checkpoint's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ._errors import CapabilityError, UsageError
from .torch import tensor  # before PyTorch: it says what lacks

import torch  # isort: skip
from torch import nn

Array = np.ndarray[Any, Any]
Config = dict[str, Any]
# Parameters of a layer, by the names that checkpoints have. A matrix of ours is [in, out], and
# PyTorch's [out, in].
Named = dict[str, torch.Tensor]

TYPED = ("rsage", "rgcn", "rgat")
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "leaky": nn.LeakyReLU,
}


def pyg(config: Config, named: Mapping[str, Array]) -> Network:
    """Returns the model with PyG's layers; see :func:`helios.load_pyg`."""
    try:
        import torch_geometric.nn
    except ImportError as e:
        raise CapabilityError("load_pyg needs PyG; install it: pip install torch_geometric") from e
    if config.get("model") in TYPED:
        from .heteromodels import Hetero

        return Hetero(config, torch_geometric.nn, named)
    return PyG(config, torch_geometric.nn, named)


def dgl(config: Config, named: Mapping[str, Array]) -> Network:
    """Returns the model with DGL's layers; see :func:`helios.load_dgl`."""
    try:
        import dgl.nn.pytorch
    except ImportError as e:
        raise CapabilityError("load_dgl needs DGL; install it, or use load_pyg") from e
    return DGL(config, dgl.nn.pytorch, named)


class Network(nn.Module):  # type: ignore[misc]
    """A model's layers, and what stands between them: residual, norm, activation, dropout.

    Attributes:
        config: the settings of the checkpoint.
        convs, norms, skips: a layer's convolution, normalisation and residual matrix each.
    """

    def __init__(self, config: Config, library: Any, named: Mapping[str, Array]) -> None:
        """Makes the layers by a checkpoint's settings, with parameters by their names."""
        super().__init__()
        self.config = config
        self.kind = str(config.get("model", "sage"))
        if self.kind in TYPED:
            raise CapabilityError(f"model {self.kind} is of typed graphs; load_pyg makes it")
        head = str(config.get("head", "none"))
        self.loops_remain = config.get("self-loops", "always") == "remaining"
        self.depth = len(config["fanout"])
        hidden = int(config["hidden"])
        classes = int(config["classes"])
        widths = [int(config["in_dim"]), *[hidden] * self.depth]
        if head == "none":
            widths[-1] = classes
        linear = bool(config.get("residual-linear", False))
        self.residual = linear or bool(config.get("residual", False))
        self.convs, self.norms, self.skips = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for i in range(self.depth):
            last, (wide, out) = i == self.depth - 1, widths[i : i + 2]
            self.convs.append(self.conv(library, wide, out, last and head == "none"))
            norm = "none" if last and head != "mlp" else config.get("norm", "none")
            self.norms.append(norm_of(norm, out))
            matrix = linear or self.residual and wide != out
            self.skips.append(nn.Linear(wide, out, bias=linear) if matrix else nn.Identity())
        self.head = head_of(config)
        self.act = ACTIVATIONS[config.get("activation", "relu")]()
        self.drop_input = nn.Dropout(config.get("feature-dropout", 0))
        self.drop = nn.Dropout(config.get("dropout", 0))
        # Numbers were learnt less their mean and divided by their deviation.
        scales = config.get("standard") or [{"mean": 0.0, "deviation": 1.0}]
        for name in ("mean", "deviation"):
            values = torch.tensor([float(s[name]) for s in scales], dtype=torch.float32)
            self.register_buffer(name, values, persistent=False)
        self.load_parameters(named)
        self.eval()

    def conv(self, library: Any, wide: int, out: int, last: bool) -> nn.Module:
        """Makes a layer of the library."""
        raise NotImplementedError

    def layer(self, i: int, graph: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the sums of layer i."""
        raise NotImplementedError

    def tensors(self, i: int) -> Named:
        """Returns the parameters of convolution i in our names and shapes, as views."""
        raise NotImplementedError

    def layers(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all nodes, before the softmax; numbers in the dataset's unit."""
        x = self.drop_input(x)
        for i in range(self.depth):
            sums = self.layer(i, graph, x)
            if self.residual:
                sums = sums + self.skips[i](x)
            if i == self.depth - 1 and not isinstance(self.head, nn.Sequential):
                return self.in_unit(self.head(sums))
            x = self.drop(self.act(self.norms[i](sums)))
        return self.in_unit(self.head(x))

    def in_unit(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns outputs in the unit of the dataset's targets, as ``predict`` writes them."""
        if not self.config.get("standard"):
            return outputs
        mean, deviation = self.get_buffer("mean"), self.get_buffer("deviation")
        return outputs * deviation + mean

    def _views(self) -> Named:
        named: Named = {}
        for i in range(self.depth):
            layer = self.tensors(i)
            skip = self.skips[i]
            if isinstance(skip, nn.Linear):
                layer["residual.weight"] = skip.weight.T
                if skip.bias is not None:
                    layer["residual.bias"] = skip.bias[None]
            layer.update(views_of_norm(self.norms[i]))
            named.update({f"layer{i}.{k}": v for k, v in layer.items()})
        return {**named, **self._head_views()}

    def _head_views(self) -> Named:
        named: Named = {}
        if isinstance(self.head, nn.Sequential):
            named.update({f"head.{k}": v for k, v in views_of_norm(self.head[1]).items()})
            dense = {"head.0.": self.head[0], "head.1.": self.head[4]}
        else:
            dense = {"head.": self.head} if isinstance(self.head, nn.Linear) else {}
        for name, matrix in dense.items():
            named[name + "weight"], named[name + "bias"] = matrix.weight.T, matrix.bias[None]
        return named

    def parameters_by_name(self) -> dict[str, Array]:
        """Returns the parameters by the names and in the shapes that checkpoints have."""
        return {k: v.detach().cpu().numpy().copy() for k, v in self._views().items()}

    def load_parameters(self, named: Mapping[str, Array]) -> None:
        """Sets the parameters, by the names and in the shapes that checkpoints have."""
        views = self._views()
        if set(views) != set(named):
            odd = ", ".join(sorted(set(views) ^ set(named)))
            raise UsageError(f"a {self.kind} of these settings and the parameters differ in {odd}")
        with torch.no_grad():
            for name, view in views.items():
                value = tensor(np.array(named[name], np.float32))
                if view.shape != value.shape:
                    raise UsageError(
                        f"{name} is {list(value.shape)}, the model's {list(view.shape)}"
                    )
                view.copy_(value)

    def _gin(self, wide: int, out: int) -> nn.Sequential:
        middle = int(self.config["hidden"])
        act = ACTIVATIONS[self.config.get("activation", "relu")]()
        return nn.Sequential(nn.Linear(wide, middle), act, nn.Linear(middle, out))

    def _averages(self, i: int) -> bool:
        """Reports whether attention's heads in layer i are averaged, not joined."""
        return i == self.depth - 1 and isinstance(self.head, nn.Identity)

    def _heads(self, out: int, last: bool) -> tuple[int, int]:
        heads = int(self.config.get("heads", 1))
        if not last:
            return heads, out // heads
        return int(self.config.get("heads-out", heads)), out


def head_of(config: Config) -> nn.Module:
    """Makes what follows the last layer."""
    hidden, kind = int(config["hidden"]), config.get("head", "none")
    if kind == "none":
        return nn.Identity()
    dense = nn.Linear(hidden, int(config["classes"]))
    if kind == "linear":
        return dense
    first, drop = nn.Linear(hidden, hidden), nn.Dropout(config.get("dropout", 0))
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), drop, dense)


def norm_of(kind: str, out: int) -> nn.Module:
    """Makes a normalisation by its name."""
    if kind == "none":
        return nn.Identity()
    return nn.BatchNorm1d(out) if kind == "batch" else nn.LayerNorm(out)


def views_of_norm(norm: nn.Module) -> Named:
    if isinstance(norm, nn.Identity):
        return {}
    named = {"norm.gamma": norm.weight[None], "norm.beta": norm.bias[None]}
    if isinstance(norm, nn.BatchNorm1d):
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None and variance is not None
        named["norm.running_mean"], named["norm.running_var"] = mean[None], variance[None]
    return named


def _mlp(mlp: nn.Sequential, eps: Any) -> Named:
    named = {}
    for n, at in enumerate((0, 2)):
        named[f"mlp{n}.weight"] = mlp[at].weight.T
        named[f"mlp{n}.bias"] = mlp[at].bias[None]
    if isinstance(eps, nn.Parameter):
        named["eps"] = eps.view(1, 1)
    return named


class PyG(Network):
    """A network of SAGEConv, GCNConv, GATConv or GINConv of PyG."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all nodes, before the softmax."""
        if self.kind in ("gcn", "gat") and not self.loops_remain:
            own = torch.arange(x.size(0), device=x.device)
            edge_index = torch.cat([edge_index, torch.stack([own, own])], dim=1)
        return self.layers(edge_index, x)

    def layer(self, i: int, graph: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the sums of layer i."""
        return self.convs[i](x, graph)

    def conv(self, library: Any, wide: int, out: int, last: bool) -> nn.Module:
        """Makes a layer of PyG."""
        made: nn.Module
        if self.kind == "sage":
            made = library.SAGEConv(wide, out)
        elif self.kind == "gcn":
            made = library.GCNConv(wide, out, add_self_loops=self.loops_remain)
        elif self.kind == "gat":
            heads, each = self._heads(out, last)
            made = library.GATConv(
                wide,
                each,
                heads=heads,
                concat=not last,
                dropout=self.config.get("attention-dropout", 0),
                add_self_loops=self.loops_remain,
            )
        elif self.kind == "gin":
            made = library.GINConv(
                self._gin(wide, out), train_eps=bool(self.config.get("learn-eps", False))
            )
        else:
            raise CapabilityError(f"model {self.kind} has no layer of PyG here")
        return made

    def tensors(self, i: int) -> Named:
        """Returns the parameters of convolution i in our names and shapes, as views."""
        c: Any = self.convs[i]
        if self.kind == "sage":
            return {
                "self.weight": c.lin_r.weight.T,
                "neigh.weight": c.lin_l.weight.T,
                "bias": c.lin_l.bias[None],
            }
        if self.kind == "gin":
            return _mlp(c.nn, c.eps)
        if self.kind == "gcn":
            return {"weight": c.lin.weight.T, "bias": c.bias[None]}
        lin = c.lin if getattr(c, "lin", None) is not None else c.lin_src  # by PyG's version
        return {
            "weight": lin.weight.T,
            "att_src": c.att_src[0],
            "att_dst": c.att_dst[0],
            "bias": c.bias[None],
        }


class DGL(Network):
    """A network of SAGEConv, GraphConv, GATConv or GINConv of DGL."""

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all nodes, before the softmax."""
        if self.kind in ("gcn", "gat"):
            import dgl as library

            if self.loops_remain:
                graph = library.remove_self_loop(graph)
            graph = library.add_self_loop(graph)
        return self.layers(graph, x)

    def layer(self, i: int, graph: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the sums of layer i."""
        conv: Any = self.convs[i]
        if self.kind == "gcn":  # by in-degrees at both ends, where norm="both" has out-degrees
            source, target = graph.edges()
            root = graph.in_degrees().to(x.dtype).rsqrt()
            return conv(graph, x, edge_weight=root[source] * root[target])
        out: torch.Tensor = conv(graph, x)
        if self.kind == "gat":
            return out.mean(1) if self._averages(i) else out.flatten(1)
        return out

    def conv(self, library: Any, wide: int, out: int, last: bool) -> nn.Module:
        """Makes a layer of DGL."""
        made: nn.Module
        if self.kind == "sage":
            made = library.SAGEConv(wide, out, "mean")
        elif self.kind == "gcn":
            made = library.GraphConv(wide, out, norm="none")
        elif self.kind == "gat":
            heads, each = self._heads(out, last)
            drop = self.config.get("attention-dropout", 0)
            made = library.GATConv(wide, each, heads, attn_drop=drop)
        elif self.kind == "gin":
            learn = bool(self.config.get("learn-eps", False))
            made = library.GINConv(self._gin(wide, out), "sum", learn_eps=learn)
        else:
            raise CapabilityError(f"model {self.kind} has no layer of DGL here")
        return made

    def tensors(self, i: int) -> Named:
        """Returns the parameters of convolution i in our names and shapes, as views."""
        c: Any = self.convs[i]
        if self.kind == "sage":
            return {
                "self.weight": c.fc_self.weight.T,
                "neigh.weight": c.fc_neigh.weight.T,
                "bias": c.fc_self.bias[None],
            }
        if self.kind == "gin":
            return _mlp(c.apply_func, c.eps)
        if self.kind == "gcn":
            return {"weight": c.weight, "bias": c.bias[None]}
        return {
            "weight": c.fc.weight.T,
            "att_src": c.attn_l[0],
            "att_dst": c.attn_r[0],
            "bias": c.bias[None],
        }

    def _views(self) -> Named:
        named = super()._views()
        if self.kind == "gat" and self._averages(self.depth - 1):  # a bias for each head
            name, last = f"layer{self.depth - 1}.bias", self.depth - 1
            heads = self._heads(1, last=True)[0]
            bias: Any = self.convs[last].bias
            named[name] = bias.view(heads, -1).mean(0)[None]
        return named

    def load_parameters(self, named: Mapping[str, Array]) -> None:
        """Sets the parameters, by the names and in the shapes that checkpoints have."""
        super().load_parameters(named)
        if self.kind == "gat" and self._averages(self.depth - 1):
            bias: Any = self.convs[-1].bias
            value = tensor(np.array(named[f"layer{self.depth - 1}.bias"], np.float32))
            with torch.no_grad():
                bias.view(-1, value.size(1)).copy_(value.expand(bias.numel() // value.size(1), -1))


def export_onnx(model: PyG, path: Any, x: torch.Tensor, edge_index: torch.Tensor) -> None:
    """Writes a model of :func:`helios.load_pyg` as ONNX, by PyTorch's exporter.

    Inputs ``x`` and ``edge_index`` and the output ``scores`` may have any number of nodes and
    edges. The arguments are an example of both. The exporter lacks what the softmax of gat needs.
    """
    if model.kind == "gat":
        raise CapabilityError(
            "PyTorch's exporter has no maximum by index, which the attention of gat needs; "
            "models sage, gcn and gin can be exported"
        )
    # The exporter that traces: the other one wants a package of its own.
    traced = "dynamo" in inspect.signature(torch.onnx.export).parameters
    torch.onnx.export(
        model,
        (x, edge_index),
        str(path),
        input_names=["x", "edge_index"],
        output_names=["scores"],
        dynamic_axes={"x": {0: "nodes"}, "edge_index": {1: "edges"}, "scores": {0: "nodes"}},
        opset_version=17,
        **({"dynamo": False} if traced else {}),
    )
