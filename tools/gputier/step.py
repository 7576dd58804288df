# A training step of GraphSAGE in PyTorch on blocks of given sizes, for comparison with ours: forward, backward, Adam.
# Prints a JSON object per precision. Exit code 77: what it needs is not there.
import json
import sys
import time

try:
    import torch
except Exception as e:
    print("no PyTorch: %s" % e)
    sys.exit(77)
if not torch.cuda.is_available():
    print("PyTorch %s finds no GPU" % torch.__version__)
    sys.exit(77)
try:
    import torch_geometric
    from torch_geometric.nn import SAGEConv

    name = "PyG %s, PyTorch %s" % (torch_geometric.__version__, torch.__version__)
except Exception:
    SAGEConv = None
    name = "PyTorch %s (index_add)" % torch.__version__

cfg = json.loads(sys.argv[1])
dev = torch.device("cuda")
torch.manual_seed(1)


class Plain(torch.nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own = torch.nn.Linear(i, o)
        self.mean = torch.nn.Linear(i, o, bias=False)

    def forward(self, x, edges):
        src, dst = edges
        x, own = x
        n = own.shape[0]
        total = torch.zeros(n, x.shape[1], device=dev, dtype=x.dtype).index_add_(0, dst, x[src])
        count = torch.zeros(n, device=dev, dtype=x.dtype).index_add_(0, dst, torch.ones(len(dst), device=dev, dtype=x.dtype))
        return self.own(own) + self.mean(total / count.clamp(min=1)[:, None])


def conv(i, o):
    return SAGEConv(i, o).to(dev) if SAGEConv else Plain(i, o).to(dev)


blocks = cfg["blocks"]
dims = [cfg["dim"]] + [cfg["hidden"]] * (len(blocks) - 1) + [cfg["classes"]]
x = torch.rand(blocks[0]["src"], cfg["dim"], device=dev) * 2 - 1
labels = torch.randint(cfg["classes"], (blocks[-1]["dst"],), device=dev)
edges = []
for b in blocks:
    dst = torch.arange(b["edges"], device=dev) * b["dst"] // b["edges"]
    edges.append(torch.stack([torch.randint(b["src"], (b["edges"],), device=dev), dst]))
for precision in cfg["precisions"]:
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    layers = torch.nn.ModuleList(conv(dims[i], dims[i + 1]) for i in range(len(blocks)))
    adam = torch.optim.Adam(layers.parameters(), lr=1e-4, fused=True)

    def step():
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            h = x
            for i, layer in enumerate(layers):
                h = layer((h, h[: blocks[i]["dst"]]), edges[i])
                if i + 1 < len(layers):
                    h = torch.relu(h)
            loss = torch.nn.functional.cross_entropy(h.float(), labels)
        loss.backward()
        adam.step()
        return loss

    try:
        for _ in range(3):
            loss = step()
        torch.cuda.synchronize()
        took = []
        end = time.time() + cfg["seconds"]
        while len(took) < 5 or time.time() < end:
            start = time.time()
            loss = step()
            torch.cuda.synchronize()
            took.append(time.time() - start)
    except torch.cuda.OutOfMemoryError as e:
        print("out of GPU memory in %s: %s" % (precision, str(e).split(".")[0]), file=sys.stderr)
        sys.exit(1)
    if not bool(torch.isfinite(loss)):
        print("the loss is %s in %s" % (loss.item(), precision), file=sys.stderr)
        sys.exit(1)
    took.sort()
    print(json.dumps({"framework": name, "precision": precision, "steps": len(took), "loss": loss.item(),
                      "seconds": {"median": took[len(took) // 2], "min": took[0], "max": took[-1]}}))
