# heliosctl: build, test and show. Needs Go and bash; no GPU, no root, no cgo.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

GO ?= go
export CGO_ENABLED ?= 0

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -X main.version=$(VERSION)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
SCRIPTS := .ci/run $(wildcard tools/*.sh)

# Formats that the import tests read, where they are present (see .ci/run).
HELIOS_TESTDATA ?= $(abspath ../shared/data)
export HELIOS_TESTDATA

.PHONY: build demo test race fuzz bench lint generate clean

build:
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/heliosctl ./cmd/heliosctl

# The main job from nothing to a comparison, in ./demo-out.
demo: build
	./tools/demo.sh

test:
	$(GO) test -timeout 5m ./...

race:
	CGO_ENABLED=1 $(GO) test -race -short -timeout 10m ./...

# Each fuzz target for FUZZTIME.
FUZZTIME ?= 6s
fuzz:
	./tools/fuzz.sh $(FUZZTIME)

# I/O rows of the proxied SSDs, in turn with fio on the same file where fio is installed.
bench: build
	$(GO) run ./tools/fiocompare -heliosctl bin/heliosctl

lint:
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	@if command -v shellcheck >/dev/null; then shellcheck $(SCRIPTS) && echo "shellcheck $(SCRIPTS)"; \
	else echo "shellcheck is not installed; scripts unchecked"; fi

generate:
	$(GO) generate ./...

clean:
	rm -rf bin
