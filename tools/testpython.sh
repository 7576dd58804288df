#!/usr/bin/env bash
# Checks, builds and tests the Python package: tools/testpython.sh DIR [PYTEST ARGUMENTS]. DIR keeps
# the environments between calls: one with NumPy alone, one with PyTorch and PyG too, and one with DGL
# and the older PyTorch that it wants (some 6 and 5 GB, most of it CUDA libraries that PyTorch's wheels
# ask for). Where PyTorch or DGL cannot be installed, the exit code is 3 after the others; where there
# are no wheels of DGL for this Python or processor, that is said. HELIOSCTL names the binary; PYTHON
# the interpreter (3.10 or newer). HELIOS_PYTHON_TORCH=no leaves both out.
set -euo pipefail
dir=${1:?usage: tools/testpython.sh DIR [PYTEST ARGUMENTS]}
shift
cd "$(dirname "$(realpath "$0")")/.."
PYTHON=${PYTHON:-python3}
export HELIOSCTL=${HELIOSCTL:-$PWD/bin/heliosctl}
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
if [ ! -x "$HELIOSCTL" ]; then
	echo "testpython: $HELIOSCTL is not there; run \"make build\" first" >&2
	exit 1
fi
if ! "$PYTHON" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))'; then
	echo "testpython: $PYTHON is older than 3.10 or has no venv (Debian: python3-venv)" >&2
	exit 3
fi
# shellcheck source=tools/owned.sh
. tools/owned.sh
owned_parent "$dir"
mkdir -p "$dir"

# environment NAME REQUIREMENTS…: makes $dir/NAME unless it is there of the same requirements.
environment() {
	local env=$dir/$1 file of
	shift
	of=$("$PYTHON" --version && cat "$@")
	if [ -f "$env/made-of" ] && [ "$(cat "$env/made-of")" = "$of" ]; then
		return
	fi
	rm -rf "$env"
	"$PYTHON" -m venv "$env" || return
	for file in "$@"; do
		timeout 900 "$env/bin/pip" install -q --only-binary :all: -r "$file" || return
	done
	echo "$of" >"$env/made-of"
}

# wheels: builds them, and again from a copy of the sources in another folder: equal to the byte.
wheels() {
	local again
	again=$(mktemp -d)
	rm -rf "$dir/wheels"
	./tools/wheels.sh "$dir/wheels" "$@"
	mkdir "$again/copy"
	git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -C "$again/copy"
	(cd "$again/copy" && ./tools/wheels.sh "$again/wheels" "$@")
	diff -r "$dir/wheels" "$again/wheels"
	rm -rf "$again"
	(cd "$dir/wheels" && sha256sum -- *)
}

# has_dgl: whether there are wheels of DGL and its PyTorch for this Python and processor.
has_dgl() {
	"$PYTHON" -c 'import platform, sys
sys.exit(not (sys.version_info < (3, 13) and platform.machine() == "x86_64"))'
}

# suite NAME [PYTEST ARGUMENTS]: the tests on the package as it is installed from its wheel.
suite() {
	local env=$dir/$1
	shift
	"$env/bin/pip" install -q --no-deps --no-index --force-reinstall "$dir"/wheels/helios_gnn-*.whl
	(cd python/tests && "$env/bin/pytest" -c ../pyproject.toml --rootdir . "$@" .)
}

environment plain python/requirements-test.txt
(
	cd python
	"$dir/plain/bin/ruff" check --no-cache . ../examples/pytorch
	"$dir/plain/bin/ruff" format --no-cache --check . ../examples/pytorch
	"$dir/plain/bin/mypy" --cache-dir "$dir/mypy"
)
export HELIOS_WHEELS=$dir/wheels HATCHLING=$dir/plain/bin/hatchling
echo "testpython: the wheels and the sdist, built twice"
if [ "${HELIOS_PYTHON_TORCH:-}" = no ]; then wheels; else wheels amd64 arm64; fi
if command -v "${CXX:-g++}" >/dev/null; then
	HELIOS_FAKE_LIBCUDA=$(CGO_ENABLED=0 go -C tools run ./fakelib -o "$dir/libcuda")
	export HELIOS_FAKE_LIBCUDA
else
	echo "testpython: no C++ compiler (g++, or CXX): THE TESTS OF TENSORS ON A GPU DO NOT RUN"
fi
echo "testpython: NumPy alone"
suite plain "$@"
if [ "${HELIOS_PYTHON_TORCH:-}" = no ]; then
	echo "testpython: HELIOS_PYTHON_TORCH=no: THE TESTS OF PyTorch, PyG AND DGL DID NOT RUN"
	exit
fi
lacks=
if environment torch python/requirements-test.txt python/requirements-torch.txt; then
	echo "testpython: with PyTorch and PyG"
	suite torch "$@"
else
	lacks="PyTorch CANNOT BE INSTALLED HERE: THE TESTS OF PyTorch AND PyG DID NOT RUN"
fi
if ! has_dgl; then
	echo "testpython: no wheels of DGL for $("$PYTHON" --version) on $(uname -m): ITS TESTS DID NOT RUN"
elif environment dgl python/requirements-dgl.txt; then
	echo "testpython: with DGL, ONNX and TensorBoard"
	"$dir/dgl/bin/python" -c 'import dgl.graphbolt, onnx, tensorboard' # else they would skip
	make --no-print-directory python-docs PYTHON_ENVS="$dir" PYTHON_DOCS="$dir/docs"
	suite dgl --ignore=test_tables.py -k "dgl or graphbolt or onnx or tensorboard or hetero or pyg" "$@"
else
	lacks="${lacks:+$lacks; }DGL CANNOT BE INSTALLED HERE: ITS TESTS DID NOT RUN"
fi
if [ -n "$lacks" ]; then
	echo "testpython: $lacks" >&2
	exit 3
fi
