"""heliosctl's models of typed graphs as modules of PyG's layers, from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ._errors import CapabilityError
from .models import ACTIVATIONS, Array, Config, Named, Network, head_of, norm_of, views_of_norm

_RELATION = re.compile(r"layer0\.(?P<name>.+?)\.(?:neigh\.)?weight")


class Hetero(Network):
    """A network of SAGEConv or GATConv of PyG for each relation, whose sums are added up."""

    def __init__(self, config: Config, library: Any, named: Mapping[str, Array]) -> None:
        """Makes the layers by a checkpoint's settings and the shapes of its parameters."""
        nn.Module.__init__(self)
        self.config, self.kind = config, str(config["model"])
        for key in ("bases", "featureless"):
            if config.get(key):
                raise CapabilityError(
                    f"load_pyg makes no model with {key}: a checkpoint does not have the order of "
                    "relations; its parameters are in a safetensors file"
                )
        self.depth, self.head_kind = len(config["fanout"]), str(config.get("head", "none"))
        found = [m["name"] for m in map(_RELATION.fullmatch, named) if m]
        self.relations = [tuple(n.split(":")) for n in found if n.count(":") == 2]
        self.types = sorted({t for s, _, d in self.relations for t in (s, d)})
        self.named = {name: torch.Size(value.shape) for name, value in named.items()}
        parts = (self._layer(library, i) for i in range(self.depth))
        self.stages = nn.ModuleList(parts)
        self.tables = nn.ParameterDict(
            {
                _key(t): nn.Parameter(torch.zeros(shape))
                for t in self.types
                if (shape := self.named.get(f"embed.{t}.weight"))
            }
        )
        self.head = head_of(config)
        self.act = ACTIVATIONS[config.get("activation", "relu")]()
        self.drop_input = nn.Dropout(config.get("feature-dropout", 0))
        self.drop = nn.Dropout(config.get("dropout", 0))
        self.load_parameters(named)
        self.eval()

    def forward(
        self, x: Mapping[str, torch.Tensor], edge_index: Mapping[Any, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the scores of the nodes of each type; types with a table need no ``x``."""
        tables = {t: self.tables[_key(t)] for t in self.types if _key(t) in self.tables}
        h = {t: self.drop_input(v) for t, v in {**tables, **x}.items()}
        for i in range(self.depth):
            sums = {t: self._sums(i, t, h, edge_index) for t in self.types}
            if i == self.depth - 1 and self.head_kind != "mlp":
                return {t: self.head(v) for t, v in sums.items()}
            norms = self.stages[i]["norms"]
            h = {t: self.drop(self.act(norms[_of(norms, t)](v))) for t, v in sums.items()}
        return {t: self.head(v) for t, v in h.items()}

    def _sums(self, i: int, t: str, h: Any, edge_index: Any) -> torch.Tensor:
        stage: Any = self.stages[i]
        out = h[t].new_zeros(len(h[t]), self._width(i))
        for k, (s, name, d) in enumerate(self.relations):
            if d == t:
                out = out + stage["convs"][k]((h[s], h[d]), edge_index[s, name, d])
        for part in ("roots", "skips"):
            if len(stage[part]):
                out = out + stage[part][_of(stage[part], t)](h[t])
        return out

    def _width(self, i: int) -> int:
        last = i == self.depth - 1 and self.head_kind == "none"
        return int(self.config["classes" if last else "hidden"])

    def _layer(self, library: Any, i: int) -> nn.ModuleDict:
        out, last = self._width(i), i == self.depth - 1 and self.head_kind == "none"
        convs: list[nn.Module] = []
        for r in self.relations:
            name = f"layer{i}.{':'.join(r)}."
            if self.kind == "rgat":
                heads, each = self._heads(out, last)
                wide = self.named[name + "weight"][0]
                other = self.named.get(name + "weight_dst", (None,))[0]
                convs.append(
                    library.GATConv(
                        (wide, other) if other else wide,
                        each,
                        heads=heads,
                        concat=not last,
                        dropout=self.config.get("attention-dropout", 0),
                        add_self_loops=False,
                    )
                )
            else:
                wide = self.named[name + "neigh.weight"][0]
                bias = self.kind == "rsage"
                convs.append(library.SAGEConv((wide, wide), out, root_weight=False, bias=bias))
        bare = i == self.depth - 1 and self.head_kind != "mlp"
        norm = "none" if bare else str(self.config.get("norm", "none"))
        kinds = [""] if self.config.get("share-types") else self.types
        residual = self.config.get("residual") or self.config.get("residual-linear")
        return nn.ModuleDict(
            {
                "convs": nn.ModuleList(convs),
                "roots": self._matrices(i, ["", *self.types], "self", self.kind == "rgcn"),
                "skips": self._matrices(i, kinds if residual else [], "residual", None),
                "norms": nn.ModuleDict({_key(t): norm_of(norm, out) for t in kinds}),
            }
        )

    def _matrices(self, i: int, kinds: list[str], part: str, bias: bool | None) -> nn.ModuleDict:
        """Makes the matrices that the checkpoint has; a residual connection may be without one."""
        made = nn.ModuleDict()
        for t in kinds:
            name = f"layer{i}.{t}.{part}." if t else f"layer{i}.{part}."
            shape = self.named.get(name + "weight")
            if shape is not None:
                has = name + "bias" in self.named if bias is None else bias
                made[_key(t)] = nn.Linear(shape[0], shape[1], bias=has)
            elif part == "residual":
                made[_key(t)] = nn.Identity()
        return made

    def _views(self) -> Named:
        named: Named = {
            f"embed.{t}.weight": self.tables[_key(t)] for t in self.types if _key(t) in self.tables
        }
        for i in range(self.depth):
            stage: Any = self.stages[i]
            for r, conv in zip(self.relations, stage["convs"], strict=True):
                name = f"layer{i}.{':'.join(r)}."
                if self.kind != "rgat":
                    named[name + "neigh.weight"] = conv.lin_l.weight.T
                    if self.kind == "rsage":
                        named[name + "bias"] = conv.lin_l.bias[None]
                    continue
                lin = conv.lin if getattr(conv, "lin", None) is not None else conv.lin_src
                named[name + "weight"] = lin.weight.T
                if name + "weight_dst" in self.named:
                    named[name + "weight_dst"] = conv.lin_dst.weight.T
                named[name + "att_src"], named[name + "att_dst"] = conv.att_src[0], conv.att_dst[0]
                named[name + "bias"] = conv.bias[None]
            for part, called in (("roots", "self"), ("skips", "residual")):
                for key, m in stage[part].items():
                    if isinstance(m, nn.Linear):
                        name = _name(i, key)
                        named[f"{name}{called}.weight"] = m.weight.T
                        if m.bias is not None:  # rgcn's is of the sum, not of the matrix
                            bias = "bias" if part == "roots" else f"{called}.bias"
                            named[name + bias] = m.bias[None]
            for key, norm in stage["norms"].items():
                name = _name(i, key)
                named.update({name + k: v for k, v in views_of_norm(norm).items()})
        return {**named, **self._head_views()}


def _key(kind: str) -> str:
    """Returns a name of a part of a module: of no attribute, and without a dot."""
    return "_" + kind.replace(".", "\0")


def _name(i: int, key: str) -> str:
    kind = key[1:].replace("\0", ".")
    return f"layer{i}.{kind}." if kind else f"layer{i}."


def _of(parts: Any, kind: str) -> str:
    return _key(kind) if _key(kind) in parts else _key("")
