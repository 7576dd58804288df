# heliosctl: build, test and show. Needs Go and bash; no GPU, no root, no cgo.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

GO ?= go
# Without Go, help and doctor work, and all else says what lacks.
ifeq ($(shell command -v $(GO)),)
ifneq ($(filter-out help doctor clean uninstall,$(or $(MAKECMDGOALS),build)),)
$(error Go $(shell sed -n 's/^go //p' go.mod) or later is needed, and "$(GO)" is not in PATH: install it from https://go.dev/dl, or name it by GO=/path/to/go)
endif
endif
export CGO_ENABLED ?= 0
# Without the folder's name in them, packages are compiled once for build and test and for every clone.
export GOFLAGS := $(strip $(filter-out -trimpath,$(shell $(GO) env GOFLAGS 2>/dev/null)) -trimpath)

# python/helios/_version.py has the version; a build of no tag adds its commit.
RELEASE := v$(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' python/helios/_version.py)
VERSION := $(RELEASE)$(shell d=$$(git describe --tags --always --dirty 2>/dev/null) && [ "$$d" != $(RELEASE) ] && echo "+$${d//-/.}")
LDFLAGS := -X main.version=$(VERSION)
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
SCRIPTS := .ci/run .ci/nightly .ci/subjects .ci/steps.sh vfio-setup.sh $(wildcard tools/*.sh tools/*/*.sh cmd/*/*.sh cuda/*/*.sh examples/*.sh)

# Published data sets that some tests read: the folder beside the clone, where there is one. Where there is
# none, or where HELIOS_TESTDATA is empty, those tests skip and say what lacks. A folder that someone names
# has to have them.
ifeq ($(origin HELIOS_TESTDATA),undefined)
ifneq ($(wildcard ../shared/data/.),)
HELIOS_TESTDATA := $(abspath ../shared/data)
endif
endif
ifneq ($(HELIOS_TESTDATA),)
export HELIOS_TESTDATA
else
unexport HELIOS_TESTDATA
endif

# Where tools/cudatools.sh puts ptxas and the headers of CUDA.
CUDA_TOOLS := $(or $(HELIOS_CUDA_TOOLS),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/heliosctl/cuda-tools)

# A folder of Dartagnan (tools/litmus), from beside the clone unless HELIOS_DARTAGNAN names one.
ifeq ($(origin HELIOS_DARTAGNAN),undefined)
ifneq ($(wildcard ../shared/gpu-evidence/dartagnan/.),)
HELIOS_DARTAGNAN := $(abspath ../shared/gpu-evidence/dartagnan)
endif
endif
ifneq ($(HELIOS_DARTAGNAN),)
export HELIOS_DARTAGNAN
else
unexport HELIOS_DARTAGNAN
endif

.PHONY: build help FORCE $(filter-out bin/%,$(MAKECMDGOALS))

# The laboratory, a Go module of its own in tools: a tool is built into bin/lab and runs from here.
bin/lab/%: FORCE
	$(GO) build -C tools -o ../$@ ./$*

# GPU_BINDING=gorgonia: by gorgonia.org/cu and cgo, with headers that it fetches, and tested on the fake
# libcuda. Needs C and C++ compilers and pip.
GPU_BINDING ?= purego
build: ## bin/heliosctl
ifeq ($(GPU_BINDING),gorgonia)
	./tools/cudatools.sh "$(CUDA_TOOLS)"
	LDFLAGS='$(LDFLAGS)' ./tools/gorgonia.sh "$(CUDA_TOOLS)/include" bin/heliosctl
else ifeq ($(GPU_BINDING),purego)
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/heliosctl ./cmd/heliosctl
else
	$(error GPU_BINDING=$(GPU_BINDING) is neither purego nor gorgonia)
endif

help: ## this list
	@sed -nE 's/^([a-z][a-z-]*):[^#=]*## (.*)/  \1 \2/p' Makefile | while read -r t about; do printf '  %-14s %s\n' "$$t" "$$about"; done
	@echo 'CONTRIBUTING.md and the comments of the Makefile have the rest.'

doctor: ## which steps of .ci/run and tiers of nightly have here what they need
	@printf '%-14s %s\n' go "$$($(GO) version 2>/dev/null || echo 'lacks Go $(shell sed -n 's/^go //p' go.mod) or later: https://go.dev/dl')"
	@.ci/run --needs; .ci/nightly --needs

# MODULE, as make hands a variable PATH to every shell. Renames the Go module in one commit.
module: ## MODULE=example.org/heliosctl: give the Go module that path, in one commit
	./tools/module.sh "$(MODULE)"
test-module: ## a clone with another module path builds, and a program outside imports it
	./tools/testmodule.sh

# The binary that "make build" made, its manual pages, what shells complete, units of systemd for the daemon
# of a user and for that of a host, and a dashboard of Grafana. DESTDIR is for packagers: a folder to install into that is not the final one.
PREFIX ?= /usr/local
DESTDIR ?=
HELIOSCTL ?= bin/heliosctl
ROOT = $(DESTDIR)$(PREFIX)
INSTALLED = "$(ROOT)/bin/heliosctl" "$(ROOT)/share/man/man1/"heliosctl*.1 \
	"$(ROOT)/share/bash-completion/completions/heliosctl" \
	"$(ROOT)/share/zsh/site-functions/_heliosctl" \
	"$(ROOT)/share/fish/vendor_completions.d/heliosctl.fish" \
	"$(ROOT)"/lib/systemd/{user,system}/heliosctl.{socket,service} \
	"$(ROOT)/lib/sysusers.d/heliosctl.conf" "$(ROOT)/share/heliosctl/grafana.json"
install: ## what "make build" made, into DESTDIR and PREFIX (/usr/local)
	@test -x "$(HELIOSCTL)" || { echo 'install: $(HELIOSCTL) is not there; run "make build" first' >&2; exit 1; }
	install -Dm755 "$(HELIOSCTL)" "$(ROOT)/bin/heliosctl"
	install -d "$(ROOT)/share/man/man1"
	"$(HELIOSCTL)" man "$(ROOT)/share/man/man1"
	"$(HELIOSCTL)" completion bash | install -Dm644 /dev/stdin "$(ROOT)/share/bash-completion/completions/heliosctl"
	"$(HELIOSCTL)" completion zsh | install -Dm644 /dev/stdin "$(ROOT)/share/zsh/site-functions/_heliosctl"
	"$(HELIOSCTL)" completion fish | install -Dm644 /dev/stdin "$(ROOT)/share/fish/vendor_completions.d/heliosctl.fish"
	for of in user system; do for unit in socket service; do \
		sed 's|@PREFIX@|$(PREFIX)|' tools/systemd/$$of.$$unit | install -Dm644 /dev/stdin "$(ROOT)/lib/systemd/$$of/heliosctl.$$unit"; \
	done; done
	install -Dm644 tools/systemd/sysusers.conf "$(ROOT)/lib/sysusers.d/heliosctl.conf"
	install -Dm644 tools/grafana/heliosctl.json "$(ROOT)/share/heliosctl/grafana.json"

uninstall: ## remove what "make install" put there
	rm -f $(INSTALLED)

# The folder of a release's packages; two of them are equal to the byte. tools/release/main.go has the
# maintainer and the address of the sources, for their owner to name.
RELEASE_DIR ?= bin/release
release: bin/lab/release ## tar.gz, deb, rpm, image, wheels and SBOM for amd64 and arm64, into RELEASE_DIR
	PYTHON_ENVS="$(PYTHON_ENVS)" ./tools/release.sh "$(RELEASE_DIR)"

test-release: ## two releases are equal, the image runs, and a bare Debian takes the deb and gives it back
	./tools/testrelease.sh

# The arm64 binary, tests and results by QEMU's user mode (docs/architecture/testing.md).
test-arm64:
	./tools/testarm64.sh

# The documents as a site, with search; a dead link or anchor is an error.
SITE_DIR ?= bin/site
site: ## the documents as a site, into SITE_DIR
	PYTHON_ENVS="$(PYTHON_ENVS)" ./tools/site.sh "$(SITE_DIR)"

# The main job from nothing to a comparison, in ./demo-out.
demo: build ## a real graph from two file-backed SSDs, in 1 to 2 minutes
	bin/heliosctl demo

# Each check of the product on few cases. The packages whose tests take longest come first, and more of
# them at once than there are cores, as some wait. "make lint" has vet, and test-shim the kernels.
LONGEST := ./cmd/heliosctl ./sched ./gpuio ./internal/ranks ./dataset/stripe ./dataset/importer
test: ## each check on a few cases, in minutes
	$(GO) test -vet=off -p 3 -timeout 20m $(LONGEST) $$($(GO) list ./... | grep -v /internal/testing/shim/)

# The laboratory's own tests.
test-tools:
	$(GO) test -C tools -vet=off -timeout 20m ./...

# All cases of the tests that "make test" runs on a few (internal/testing/wide), and only
# these (tools/usersof); the packages of test-shim have theirs there. DIFF_BATCHES: random batches
# through the kernels of Go and of the shim.
DIFF_BATCHES ?= 10000
test-wide: bin/lab/usersof ## all cases, in hours
	HELIOS_WIDE=1 DIFF_BATCHES=$(DIFF_BATCHES) $(GO) test -count=1 -timeout 60m \
		$$(bin/lab/usersof -not cuda,internal/testing testing/wide)
	cd tools && HELIOS_WIDE=1 $(GO) test -count=1 -timeout 60m $$(../bin/lab/usersof testing/wide)

# The tests of the published data sets, which are an error where they lack.
test-realdata: bin/lab/usersof
	@: "$${HELIOS_TESTDATA:?names no folder of the data sets (internal/testing/realdata)}"
	HELIOS_WIDE=1 $(GO) test -count=1 -v -timeout 10m $$(bin/lab/usersof testing/realdata)

# The race detector, on few cases, and not on what runs nothing at the same time: tools, and tests of flags,
# texts, refusals and the virtual clock, which "make test" has; nor on shares of the processor's time, much of
# which it takes itself. RACED: packages, and options of go test.
NOT_RACED := Bad|Refus|Help|Document|Docs|Declared|Schema|TestCompletion$$|ManualPage|MakeInstall|VFIOSetup|FewFiles|FullDisk|ReadOnlyFolder|Rerun|Report|EpochsAreCovered|ByteTrials|TestPlan(Verb|Of|Calibrates)|KilledBinds|KilledUnbinds|KilledLoad|OddStates|ProcessorTime
RACED ?= $(LONGEST) ./...
race: ## on few cases, under the race detector
	HELIOS_WIDE=1 CGO_ENABLED=1 $(GO) test -race -short -timeout 60m -skip '$(NOT_RACED)' $(RACED)

# The CUDA kernels on the CPU shim: its own tests, the I/O kernels against model SSDs in SEEDS seeded
# schedules and TSAN_SEEDS runs under ThreadSanitizer with every planted bug, DIFF_BATCHES random
# batches through the kernels of Go and of the shim, the data kernels under ThreadSanitizer, and the
# fake driver. Needs a C++ compiler. One package after the other: each uses all cores. SHIM: packages.
SEEDS ?= 1000
TSAN_SEEDS ?= 60
SHIM ?= ./cuda/... ./internal/testing/...
test-shim:
	HELIOS_WIDE=1 SEEDS=$(SEEDS) TSAN_SEEDS=$(TSAN_SEEDS) DIFF_BATCHES=$(DIFF_BATCHES) \
		$(GO) test -count=1 -p 1 -timeout 60m $(SHIM)

# The hand-overs of the GPU's side in NVIDIA's memory model (docs/architecture/memory-model.md). Needs
# Java 17, Maven once, and HELIOS_DARTAGNAN; says so where they lack. TABLE=--table writes the results
# into the chapter.
TABLE ?=
test-litmus: bin/lab/litmus
	bin/lab/litmus run $(TABLE)

# The committed PTX of every kernel, run by tools/ptxrun behind the fake libcuda in the differential
# tests, and mutants of it, in which one instruction is changed: fails where a kernel was not executed,
# where a test fails, or where too few mutants are noticed (docs/architecture/testing.md). Needs a C++
# compiler. PTX_FLAGS: "-per 5 -survivors" for five mutants of each kernel and the list of survivors.
PTX_FLAGS ?= -per 1 -bar 0.7
test-ptx: bin/lab/ptxmutants
	nice -n 5 bin/lab/ptxmutants $(PTX_FLAGS)

# NVIDIA's libraries, PTX compilers and headers, without a GPU (docs/architecture/nvidia.md). Needs apt,
# pip, a C compiler, and x86-64; says so where there is no way to the packages. ALL=-all compiles each
# module for each architecture, WRITE=-write puts the tables into the chapter.
ALL ?=
WRITE ?=
test-nvidia: build bin/lab/nvidiatest
	bin/lab/nvidiatest $(ALL) $(WRITE)

# The fault table: every entry of docs/reference/faults.md against every stack, in virtual time and on the wall's
# clock, and FAULT_SCRIPTS random scripts; a script is replayed with FAULT_SEED. Ends with a line of counts.
FAULT_SCRIPTS ?= 10000
test-faults: export HELIOS_WIDE=1
test-faults:
	@sum=$$(mktemp); trap 'rm -f "$$sum"' EXIT; rc=0; \
	FAULT_SCRIPTS=$(FAULT_SCRIPTS) FAULT_WALL=1 FAULT_SUMMARY=$$sum $(GO) test -count=1 -timeout 30m -run '^TestFault(Table|Scripts)$$' ./gpuio || rc=1; \
	$(GO) test -count=1 -timeout 10m ./internal/faultinject ./nvme/faultbus || rc=1; \
	$(GO) test -count=1 -timeout 10m -run 'Fault|FailedWrite|TornAndLost|LyingFlush|RowSums|VerifyNamesRows' ./dataset/build ./dataset/importer ./dataset/stripe || rc=1; \
	cat "$$sum"; exit $$rc

# heliosctl on NVMe controllers that others wrote: QEMU's, behind an emulated IOMMU, in a guest with a
# stock kernel. Needs qemu-system-x86_64 and apt; no root, no KVM, no hardware. VM_SCENARIOS names some
# of the scenarios (bin/lab/vmtest -list).
VM_SCENARIOS ?=
test-vm: bin/lab/vmtest
	bin/lab/vmtest $(VM_SCENARIOS)

# heliosctl's queues on another controller that others wrote: that of the crate rsemu, without a VM
# (tools/rsemu). Needs cargo of Rust 1.91 or later; RSEMU keeps what it builds.
RSEMU ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/heliosctl/rsemu
test-rsemu:
	@command -v cargo >/dev/null || { echo "test-rsemu: no cargo (Rust 1.91 or later) is here" >&2; exit 1; }
	cargo build --quiet --release --locked --manifest-path tools/rsemu/Cargo.toml --target-dir "$(RSEMU)"
	HELIOS_RSEMU="$(abspath $(RSEMU))/release/libhelios_rsemu.so" $(GO) test -C tools -count=1 -v -timeout 10m ./rsemu

# The Python package: linter, types, and its tests against a fake daemon and the real one. Needs Python
# 3.10 and pip; PYTHON_ENVS keeps what it installs, some 11 GB with PyTorch and DGL (HELIOS_PYTHON_TORCH=no: less).
PYTHON_ENVS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/heliosctl/python
PYTEST_FLAGS ?=
test-python: build ## the Python package
	./tools/testpython.sh "$(PYTHON_ENVS)" $(PYTEST_FLAGS)

# The package's API as HTML, by pdoc in the environment with DGL that test-python makes.
PYTHON_DOCS ?= bin/python-docs
python-docs:
	cd python && PYTHONPATH=. "$(PYTHON_ENVS)/dgl/bin/pdoc" \
		--docformat google -o "$(abspath $(PYTHON_DOCS))" helios helios.models helios.pyg helios.torch helios.dgl helios.graphbolt

# The package that a GPU machine runs without Go: tests, benchmarks and a script (tools/gputier).
GPU_PACK ?= bin/gputier
test-gpu-pack: bin/lab/gputier
	bin/lab/gputier pack -o $(GPU_PACK)
	bin/lab/gputier selftest

# gorgonia.org/cu against the headers of CUDA and the fake libcuda.
test-gorgonia:
	./tools/cudatools.sh "$(CUDA_TOOLS)"
	./tools/gorgonia.sh "$(CUDA_TOOLS)/include"

# The library METIS against the partitioner's own method, and the pages of "report" in a browser, with
# axe-core from npm: here they fail where the library, Chromium or axe-core lacks.
test-metis:
	HELIOS_NEED_METIS=1 $(GO) test -count=1 -v -run METIS ./graph/partition
test-pages:
	npm install --silent --no-save --no-audit --no-fund --prefix bin/axe axe-core@4.14.1
	HELIOS_NEED_BROWSER=1 HELIOS_AXE=$(CURDIR)/bin/axe/node_modules/axe-core/axe.min.js $(GO) test -count=1 -v ./internal/htmlreport

# Damage at random places of every file that a run reads: nothing may change a result in silence.
BYTE_TRIALS ?= 2000
test-bytes:
	HELIOS_BYTE_TRIALS=$(BYTE_TRIALS) $(GO) test -count=1 -v -timeout 60m -run TestByteTrials ./cmd/heliosctl

# The built binary: damaged and malicious inputs, the long claims, and SOAK_MINUTES of everything under
# faults with SOAK_KILLS kills, after which nothing may be lost or left over.
SOAK_MINUTES ?= 30
SOAK_KILLS ?= 1000
hostile: build bin/lab/hostile
	bin/lab/hostile -heliosctl bin/heliosctl
acceptance: build bin/lab/acceptance
	bin/lab/acceptance -heliosctl bin/heliosctl -kills 200
soak: build bin/lab/acceptance
	bin/lab/acceptance -heliosctl bin/heliosctl -only soak -kills $(SOAK_KILLS) -soak $(SOAK_MINUTES)m

# The tiers in full, one after the other, or those of TIERS (.ci/nightly).
TIERS ?=
nightly: ## every tier in full, or those of TIERS
	.ci/nightly $(TIERS)

# Each fuzz target for FUZZTIME.
FUZZTIME ?= 6s
fuzz:
	./tools/fuzz.sh $(FUZZTIME)

# I/O rows of the proxied SSDs, in turn with fio on the same file where fio is installed.
bench: build bin/lab/fiocompare
	bin/lab/fiocompare -heliosctl bin/heliosctl

# SSD models in wall time and on the virtual clock; fails where they differ by more than 10 %, as they do
# on a machine that is busy with something else.
bench-clocks: bin/lab/clockcompare
	bin/lab/clockcompare -check

# Both modules by .golangci.yml, scripts, and the subjects of commits (.ci/subjects; make hooks: at commit).
lint: ## linters, scripts, workflows, subjects of commits
	$(GO) run $(GOLANGCI) run ./...
	cd tools && $(GO) run $(GOLANGCI) run ./...
	@if command -v shellcheck >/dev/null; then shellcheck -x $(SCRIPTS) && echo "shellcheck $(SCRIPTS)"; \
	else echo "shellcheck is not installed; scripts unchecked"; fi
	$(GO) run $(ACTIONLINT) -color
	.ci/subjects

hooks:
	ln -sf ../../.ci/subjects "$$(git rev-parse --git-path hooks)/commit-msg"

generate: ## reference, schema, Python settings, licences
	$(GO) generate ./...

# The PTX of cuda/kernels from its sources (clang 19), and, where ptxas is, the cubins and the table of
# what each kernel takes; kernels-check compares with what is committed. PTXAS=path names a ptxas that is not in PATH.
PTXAS ?=
PTXASFLAGS := $(if $(PTXAS),--ptxas $(PTXAS) --need-ptxas)
kernels: bin/lab/kernels
	bin/lab/kernels generate $(PTXASFLAGS)

kernels-check: bin/lab/kernels
	bin/lab/kernels check $(PTXASFLAGS)

clean: ## remove bin
	rm -rf bin
