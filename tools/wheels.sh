#!/usr/bin/env bash
# Builds the wheels and the sdist of Python, equal to the byte wherever and whenever it runs:
# tools/wheels.sh DIR [amd64] [arm64], by default of this processor. helios-gnn is pure Python; heliosctl
# has the binary, and no sdist. HATCHLING names the builder (pip install hatchling).
set -euo pipefail
dir=$(realpath -m "${1:?usage: wheels.sh DIR [amd64] [arm64]}")
shift
cd "$(dirname "$(realpath "$0")")/.."
hatchling=$(command -v "${HATCHLING:-hatchling}") || {
	echo "wheels.sh: hatchling is not there; pip install hatchling, or name it by HATCHLING" >&2
	exit 3
}
# The times of all files within; any that stays the same will do.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1577836800}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' python/helios/_version.py)
mkdir -p "$dir"
(cd python && "$hatchling" build -t sdist -t wheel -d "$dir")
for arch in "${@:-$(go env GOARCH)}"; do
	# As auditwheel finds: the binary asks for no version of a symbol of glibc (python/tests/test_wheels.py).
	case $arch in
	amd64) platform=manylinux_2_5_x86_64 ;;
	arm64) platform=manylinux_2_17_aarch64 ;;
	*)
		echo "wheels.sh: $arch has no tag; add one here" >&2
		exit 3
		;;
	esac
	CGO_ENABLED=0 GOARCH=$arch GOFLAGS=-trimpath go build -buildvcs=false -ldflags "-X main.version=v$version" \
		-o "$work/heliosctl" ./cmd/heliosctl
	(cd python/heliosctl && HELIOSCTL_BINARY=$work/heliosctl HELIOSCTL_TAG=py3-none-$platform \
		"$hatchling" build -t wheel -d "$dir")
done
