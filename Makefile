# `make demo` and `make test` need Python 3.11+ and make; they set up the rest in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo serve test test-all lint format bench clean

demo: $(VENV)/.ready  ## serve the shipped model, evaluate 20 problems with activations, shut down
	HF_HUB_OFFLINE=1 $(BIN)/python -m serve_app.demo

serve: $(VENV)/.ready  ## serve the shipped model on port 8000
	$(BIN)/serve run serve_app:app

test: lint  ## what every change must pass
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not long"

test-all: lint  ## the same with the tests that take minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-dev  ## the engine beside transformers' own ways of generating
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.engine

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
