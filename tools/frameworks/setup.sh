#!/usr/bin/env bash
# A throw-away Python environment with PyG and DGL, for compare.py and loaders.py: setup.sh DIR [PYTHON]. It takes some 7 GB of
# disk and 10 to 20 minutes of two cores, most of which compile torch_sparse. Delete DIR afterwards.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
dir=${1:?usage: setup.sh DIR [PYTHON]}
python=${2:-python3.11}
command -v "$python" >/dev/null || {
	echo "setup.sh: $python is not there; DGL 2.1.0 has wheels for CPython 3.8 to 3.11" >&2
	exit 3
}
"$python" -m venv "$dir"
"$dir/bin/pip" install -q -r "$here/requirements.txt"
# NeighborSampler and NeighborLoader of PyG need pyg-lib, which PyPI does not have, or torch_sparse.
FORCE_CUDA=0 MAX_JOBS=${MAX_JOBS:-2} "$dir/bin/pip" install -q --no-build-isolation torch_scatter==2.1.2 torch_sparse==0.6.18
"$dir/bin/python" -c '
import torch, dgl, torch_geometric, torch_sparse, torch_scatter
print("torch", torch.__version__, "pyg", torch_geometric.__version__, "torch_sparse", torch_sparse.__version__, "dgl", dgl.__version__)'
