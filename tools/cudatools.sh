#!/usr/bin/env bash
# Fetches what checks of the CUDA side need and no distribution packages: ptxas and the headers of
# CUDA 12, out of the Python wheels that carry them. tools/cudatools.sh DIR leaves DIR/bin/ptxas and
# DIR/include/cuda.h; a DIR that has them is left alone. Needs python3 with pip, and x86-64. We run what
# is in DIR, so it refuses (exit code 4) a DIR that another user could have filled, or can.
set -euo pipefail
dir=${1:?usage: tools/cudatools.sh DIR}
version=12.9.86-12.9.79

# shellcheck source=tools/owned.sh
. "$(dirname "$(realpath "$0")")/owned.sh"
owned_parent "$dir"
if [ -f "$dir/version" ] && [ "$(cat "$dir/version")" = "$version" ]; then
	echo "cudatools: $dir has $version"
	exit 0
fi
new=$(mktemp -d "$dir.XXXXXX")
trap 'rm -rf "$new"' EXIT
cat >"$new/requirements" <<'END'
nvidia-cuda-nvcc-cu12==12.9.86 --hash=sha256:5d6a0d32fdc7ea39917c20065614ae93add6f577d840233237ff08e9a38f58f0
nvidia-cuda-runtime-cu12==12.9.79 --hash=sha256:25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3
END
python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -d "$new/wheels" -r "$new/requirements"
for wheel in "$new"/wheels/*.whl; do
	python3 -m zipfile -e "$wheel" "$new/unpacked"
done
mkdir -p "$new/tools/bin" && chmod 0700 "$new/tools"
mv "$new/unpacked/nvidia/cuda_nvcc/bin/ptxas" "$new/tools/bin/"
mv "$new/unpacked/nvidia/cuda_runtime/include" "$new/tools/include"
chmod +x "$new/tools/bin/ptxas"
if [[ $("$new/tools/bin/ptxas" --version) != *V12.9.86* ]]; then
	echo "cudatools: the wheel's ptxas does not run here, or is another version" >&2
	exit 1
fi
grep -q 'define CUDA_VERSION 12090' "$new/tools/include/cuda.h"
echo "$version" >"$new/tools/version"
rm -rf "$dir"
mv -T "$new/tools" "$dir"
echo "cudatools: $version in $dir"
