#!/usr/bin/env bash
# The packages of a release, for amd64 and arm64, equal to the byte whoever makes them; the images too,
# while Debian has the same packages: tools/release.sh DIR. PYTHON_ENVS keeps hatchling, which builds the
# wheels.
set -euo pipefail
dir=$(realpath -m "${1:?usage: release.sh DIR}")
cd "$(dirname "$(realpath "$0")")/.."
if [ -n "$(ls -A "$dir" 2>/dev/null)" ]; then
	echo "release.sh: $dir is not empty; name another folder" >&2
	exit 1
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' python/helios/_version.py)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1577836800} CGO_ENABLED=0 GOFLAGS=-trimpath
umask 022
env=$PYTHON_ENVS/release
if [ ! -x "$env/bin/hatchling" ]; then
	python3 -m venv "$env"
	"$env/bin/pip" install -q "$(grep ^hatchling python/requirements-test.txt)"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dir"
for arch in amd64 arm64; do
	GOOS=linux GOARCH=$arch go build -buildvcs=false -ldflags "-s -w -X main.version=v$version" -o "$work/$arch" ./cmd/heliosctl
	GOARCH=$arch HATCHLING=$env/bin/hatchling ./tools/wheels.sh "$dir" >/dev/null
done
native=$work/$(go env GOHOSTARCH)
for arch in amd64 arm64; do
	root=$work/root-$arch
	make -s install HELIOSCTL="$native" DESTDIR="$root" PREFIX=/usr
	install -m755 "$work/$arch" "$root/usr/bin/heliosctl"
	{ cat LICENSE && "$native" version --licenses; } | install -Dm644 /dev/stdin "$root/usr/share/doc/heliosctl/copyright"
	./tools/debianroot.sh "$arch" "$work/debian-$arch"
	bin/lab/release -version "$version" -arch "$arch" -root "$root" -base "$work/debian-$arch" -o "$dir"
done
(cd "$dir" && sha256sum -- * >SHA256SUMS && ls -l)
