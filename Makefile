# `make install` gives .venv/bin/provision; the other targets add what they need to the same .venv.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV   := .venv
BIN    := $(VENV)/bin
# Two workers, whole files each: fixtures of a file are built once.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile -p no:randomly
# Without an argument pip follows the user's own settings: index, mirror, find-links, proxy, certificate.
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: install dev test test-fast test-random test-tools test-server check format lint types bench docs wheel clean

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --editable .
	touch $@

dev: $(VENV)/.dev
$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --editable '.[dev]'
	touch $@

test: dev
	$(PYTEST) $(PYTEST_ARGS)

test-fast: dev
	$(PYTEST) -m 'not network and not slow and not gpu' $(PYTEST_ARGS)

# All tests in an order of its own each time; its seed is printed.
test-random: dev
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile $(PYTEST_ARGS)

# What the longest tests need; both say so where the machine cannot have it.
test-tools:
	.ci/install-tools

test-server: dev
	$(BIN)/python -m tests.support.cpu_server

check: lint types test

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: dev
	$(BIN)/mypy

bench: dev
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: install
	$(BIN)/python docs/update_drift.py

wheel: install
	$(BIN)/uv build --wheel --out-dir dist --python $(BIN)/python

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis .bench
