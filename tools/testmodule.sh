#!/usr/bin/env bash
# A scratch clone whose module has another path (tools/module.sh) builds, tests included; a program
# outside imports it, and "go install" makes heliosctl of it, through a proxy of files.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
module=example.org/graphs/heliosctl
version=v$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' python/helios/_version.py)
dir=$(mktemp -d)
trap 'chmod -R u+w "$dir" && rm -rf "$dir"' EXIT
git clone -q --no-hardlinks . "$dir/clone"
cd "$dir/clone"
git config user.name test && git config user.email test@example.org
make module MODULE=$module
if git grep -nE '"helios/|^\s*(import )?([A-Za-z_.]+ )?"helios"$|^(module|replace) helios' -- '*.go' '*go.mod'; then
	echo "testmodule: these still have the former path" >&2
	exit 1
fi
go vet ./... && go -C tools vet ./...
go test ./internal/lint ./internal/options ./cmd/heliosctl -run 'Imports|Options|Schema|Docs|Example'

# A proxy serves these of a version. A module's zip has no module below it.
at=$dir/proxy/$module/@v
mkdir -p "$at"
echo "$version" >"$at/list"
echo "{\"Version\":\"$version\"}" >"$at/$version.info"
cp go.mod "$at/$version.mod"
git archive --format=zip --prefix="$module@$version/" -o "$at/$version.zip" HEAD -- . ':!tools'
GOPROXY=file://$dir/proxy,file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)
export GOPROXY GONOSUMDB=$module GOMODCACHE=$dir/modules GOFLAGS=-modcacherw GOBIN=$dir/bin
go install "$module/cmd/heliosctl@$version"
"$dir/bin/heliosctl" version | tee /dev/stderr | grep -q "^heliosctl $version "
"$dir/bin/heliosctl" generate --nodes 2000 --dim 8 --out "$dir/g" --quiet
mkdir "$dir/outside" && cd "$dir/outside"
go mod init example.org/outside
cat >main.go <<END
package main

import (
	"fmt"

	"$module"
)

func main() {
	data, err := helios.Open("$dir/g")
	if err != nil {
		panic(err)
	}
	defer data.Close()
	fmt.Println(data.Dim(), "features")
}
END
go get "$module@$version"
go vet . && go run . | tee /dev/stderr | grep -qx "8 features"
