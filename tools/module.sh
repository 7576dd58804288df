#!/usr/bin/env bash
# Gives the Go module another path, in one commit: tools/module.sh example.org/heliosctl.
set -euo pipefail
new=${1:?usage: make module MODULE=example.org/heliosctl}
cd "$(dirname "$(realpath "$0")")/.."
old=$(go list -m)
if [ -n "$(git status --porcelain)" ]; then
	echo "module.sh: there are changes that are not committed; commit or stash them first" >&2
	exit 1
fi
# Imports of packages below the root, strings that name them, and imports of the root itself.
from=${old//./\\.}
git ls-files -z '*.go' '*.md' '.golangci.yml' | xargs -0 sed -Ei \
	-e "s#\"$from/([a-z\"])#\"$new/\\1#g" \
	-e "s#^(\\s*(import )?([A-Za-z_.]+ )?)\"$from\"\$#\\1\"$new\"#" \
	-e "s#^(\\s+- )$from\$#\\1$new#"
go mod edit -module "$new"
go mod edit -module "$new/tools" -dropreplace "$old" -droprequire "$old" \
	-replace "$new=../" -require "$new@v0.0.0" tools/go.mod
git diff -z --name-only -- '*.go' | xargs -0 gofmt -w
(cd tools && go mod tidy)
git commit -qam "module: the path is $new"
git log --stat --oneline -1 | tail -n 1
