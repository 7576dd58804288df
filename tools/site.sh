#!/usr/bin/env bash
# Builds the documents as a site, with search, and fails at a dead link: tools/site.sh DIR. Files that a
# document links to and that are no documents are copied beside it. PYTHON_ENVS keeps mkdocs.
set -euo pipefail
dir=$(realpath -m "${1:?usage: site.sh DIR}")
cd "$(dirname "$(realpath "$0")")/.."
env=$PYTHON_ENVS/site
if ! cmp -s tools/site/requirements.txt "$env/made-of"; then
	python3 -m venv --clear "$env"
	"$env/bin/pip" install -q -r tools/site/requirements.txt
	cp tools/site/requirements.txt "$env/made-of"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp tools/site/mkdocs.yml "$work"
mkdir "$work/docs"
git ls-files '*.md' '*.json' '*.svg' '*.go' '*.sh' '*.py' '*.yaml' '*.cu' LICENSE | xargs cp --parents -t "$work/docs"
NO_MKDOCS_2_WARNING=1 "$env/bin/mkdocs" build --strict -f "$work/mkdocs.yml"
mkdir -p "$dir"
cp -r "$work/site/." "$dir"
echo "site: $(find "$dir" -name '*.html' | wc -l) pages in $dir"
