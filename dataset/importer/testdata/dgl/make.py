"""Writes the files of this folder with dgl.save_graphs; seen to work with DGL 2.1.0 and PyTorch 2.2.1: make.py FOLDER"""
import sys

import dgl
import torch

out = sys.argv[1] + "/"


def graph(idtype, feat=torch.float32):
    src, dst = torch.tensor([0, 0, 3, 3, 4, 1]), torch.tensor([1, 2, 2, 2, 4, 0])
    g = dgl.graph((src, dst), num_nodes=5, idtype=idtype)
    g.ndata["feat"] = torch.arange(10).reshape(5, 2).to(feat)
    g.ndata["label"] = torch.tensor([0, 1, 2, 1, 0])
    for name, ids in dict(train=[4, 1], val=[0], test=[2, 3]).items():
        mask = torch.zeros(5, dtype=torch.bool)
        mask[ids] = True
        g.ndata[name + "_mask"] = mask
    g.edata["w"] = torch.arange(6).float()
    return g


def save(name, graphs, *more, **options):
    dgl.save_graphs(out + name, graphs, *more, **options)
    with open(out + name, "r+b") as f:  # DGL leaves what was in memory in the reserved part
        f.seek(32)
        f.write(bytes(4096 - 32))


save("int32.bin", [graph(torch.int32)], {"glabel": torch.tensor([1, 2])})
save("csr.bin", [graph(torch.int64).formats(["csr"])])
save("all.bin", [graph(torch.int64)], formats=["coo", "csr", "csc"])
small = dgl.graph((torch.tensor([0]), torch.tensor([1])))
save("three.bin", [small, graph(torch.int64, torch.float16), small], {"y": torch.tensor([1, 2, 3])})
pair = (torch.tensor([0]), torch.tensor([0]))
save("hetero.bin", [dgl.heterograph({("a", "to", "b"): pair, ("b", "from", "a"): pair})])
