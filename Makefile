# Every target works from a fresh clone: it makes .venv itself. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CHIPS  := .venv-chips
# A worker for each core, up to eight; what a worker has left over, one that is done takes from its end.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal
# What is compiled is kept: hundreds of processes import the same.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run fmt lint types test test-slow test-recipes test-all test-chips bench check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "redco needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# Modules are compiled when they are imported: most of what the tests install never is.
$(VENV)/.dev: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@touch $@ $(VENV)/.run

install: $(VENV)/.run ## make the environment: redco and what it needs

run: install ## train the quickstart recipe on real text, then continue four prompts
	$(BIN)/redco train quickstart
	$(BIN)/redco predict runs/quickstart --show 4

fmt: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.dev ## style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev ## types, strictly
	$(BIN)/mypy

test: $(VENV)/.dev ## the tests, minutes
	$(PYTEST) -m 'not slow'

# TRL, unpacked and not installed: its chat templates with their training twins, and its packing, to compare with.
$(VENV)/oracles/trl: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oracles trl==1.16.0
	@touch $@

# bitsandbytes likewise: its wheel is of all CUDA versions, and the tests need its quantisation on a CPU.
$(VENV)/oracles/bitsandbytes: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oracles bitsandbytes==0.50.2
	@touch $@

test-slow: $(VENV)/oracles/trl $(VENV)/oracles/bitsandbytes ## the tests and the slow matrices, long
	$(PYTEST) -m 'not recipe' --timeout 900

test-recipes: $(VENV)/.dev ## train the recipes to the figures of their headers, three seeds each, long
	$(PYTEST) -m recipe

test-all: test-slow test-recipes ## every test

# The compilers of GPUs and TPUs, in an environment of their own: they are large, and no other test needs them.
$(CHIPS)/.chips: pyproject.toml
	$(PYTHON) -m venv $(CHIPS)
	$(CHIPS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[tpu,cuda12]'
	@touch $@

test-chips: $(CHIPS)/.chips $(VENV)/.dev ## compile for GPUs and TPUs that are not there, and test what comes out
	JAX_PLATFORMS=cpu $(CHIPS)/bin/python -m tests.chips.programs
	JAX_PLATFORMS=cpu $(CHIPS)/bin/python -m tests.chips.adapters
	JAX_PLATFORMS=cpu $(CHIPS)/bin/python -m tests.chips.steps
	$(PYTEST) tests/chips

bench: $(VENV)/.dev ## every benchmark, one after the other: writes BENCHMARKS.md
	$(BIN)/python tests/bench/everything.py

check: lint types test ## what CI runs

clean: ## remove the environment, caches and runs
	rm -rf $(VENV) $(CHIPS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs
