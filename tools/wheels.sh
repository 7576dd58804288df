#!/usr/bin/env bash
# Builds both wheels of Python, equal to the byte wherever and whenever it runs: tools/wheels.sh DIR.
# helios-gnn is pure Python; heliosctl has the binary. HATCHLING names the builder (pip install hatchling).
set -euo pipefail
dir=$(realpath -m "${1:?usage: wheels.sh DIR}")
cd "$(dirname "$(realpath "$0")")/.."
hatchling=$(command -v "${HATCHLING:-hatchling}") || {
	echo "wheels.sh: hatchling is not there; pip install hatchling, or name it by HATCHLING" >&2
	exit 3
}
# The times of all files within; any that stays the same will do.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1577836800}
# As auditwheel finds: the binary asks for no version of a symbol of glibc (python/tests/test_wheels.py).
case $(go env GOARCH) in
amd64) platform=manylinux_2_5_x86_64 ;;
arm64) platform=manylinux_2_17_aarch64 ;;
*)
	echo "wheels.sh: $(go env GOARCH) has no tag; add one here" >&2
	exit 3
	;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' python/helios/_version.py)
CGO_ENABLED=0 GOFLAGS=-trimpath go build -buildvcs=false -ldflags "-X main.version=v$version" \
	-o "$work/heliosctl" ./cmd/heliosctl
mkdir -p "$dir"
(cd python && "$hatchling" build -t wheel -d "$dir")
(cd python/heliosctl && HELIOSCTL_BINARY=$work/heliosctl HELIOSCTL_TAG=py3-none-$platform \
	"$hatchling" build -t wheel -d "$dir")
