# make demo     install into .venv and train the quickstart
# make test     install, lint, types, layers, fast tests (no network but the package registry, no GPU)
# make test-slow  tests with real processes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo install lint types layers test test-fast test-slow docs benchmarks clean

demo: install
	$(BIN)/rollart launch --cluster configs/clusters/local.yaml

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,envs,dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

test-fast: install
	$(BIN)/python -m pytest

test-slow: install
	$(BIN)/python -m pytest -m slow

test: lint types layers test-fast

docs: install
	$(BIN)/python -m rollart.spec.reference > docs/spec.md

benchmarks: install
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/async_vs_sync.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
