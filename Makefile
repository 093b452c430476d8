# `make demo` and `make test` need Python 3.11+ and make; they set up the rest in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip --quiet --disable-pip-version-check install --no-deps --no-compile
LOCKED := $(PIP) --require-hashes

# Each of many processes would compile torch and Ray again: their first import takes 26 s then, and 10 s otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo serve smollm2 test test-fast test-all chaos coverage lint format docs docs-serve notebooks lock bench bench-engine bench-gpu bench-serving bench-scaling bench-collecting bench-writing bench-reading clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*##  *\(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: $(VENV)/.ready  ## serve the shipped model, evaluate 20 problems with activations, shut down
	RAY_ADDRESS=local HF_HUB_OFFLINE=1 $(BIN)/python -m evals.gsm8k --serve vitrine-demo \
		--base-url http://127.0.0.1:0/v1 --samples 20 --collect-activations

serve: $(VENV)/.ready  ## serve the shipped model on port 8000
	$(BIN)/serve run serve_app:app

smollm2: $(VENV)/.ready  ## fetch a small real model, SmolLM2-135M-Instruct, for `serve run ... model=smollm2`
	@$(BIN)/python $(LOCKED) -r locks/gguf.txt || { echo "pip cannot install gguf: is the package index out of reach?" >&2; exit 1; }
	@$(BIN)/python -m deployments.model_files.smollm2

PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --durations=10

test: lint  ## what every change must pass
	$(PYTEST) -n 3 -m "not long"

test-fast: $(VENV)/.ready-dev  ## what needs no server, for every edit: under three minutes
	$(PYTEST) -n 3 -m "not long and not server and not slow"

test-all: lint  ## the same with the tests that take minutes, and ten times as many examples of each property
	$(PYTEST) --hypothesis-profile=many

chaos: $(VENV)/.ready-dev  ## faults of a cluster under load, all or one: make chaos CHAOS=9 SEED=3 (as root, with redis-server)
	@rm -f build/chaos.md
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/chaos -v; status=$$?; cat build/chaos.md; exit $$status

coverage: $(VENV)/.ready-dev  ## the tests again, and which lines and branches they reach
	$(BIN)/coverage erase
	HF_HUB_OFFLINE=1 $(BIN)/coverage run -m pytest -n 3 -m "not long"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: $(VENV)/.ready-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev  ## put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready-dev  ## build the documentation into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.ready-dev  ## show the documentation on port 8008 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8008

notebooks: $(VENV)/.ready-dev smollm2  ## run the notebooks on SmolLM2 and save their outputs, all or some: make notebooks NAMES="recall errors"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nbclient ipykernel
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python examples/run_notebooks.py $(NAMES)

lock: $(VENV)/bin/python  ## write the files in locks/ anew, after a dependency has changed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv packaging
	$(BIN)/python locks/lock.py

bench: bench-engine bench-serving bench-scaling bench-collecting bench-writing bench-reading  ## all benchmarks but bench-gpu, one after another

bench-engine: $(VENV)/.ready-dev  ## the engine compared with transformers and nnsight
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.engine

bench-gpu: $(VENV)/.ready-dev  ## the engine alone on a GPU: its tests and its speed
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.gpu

bench-serving: $(VENV)/.ready-dev  ## the cost of HTTP, beside transformers serve and vLLM (which it installs: 3.4 GB)
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.serving

bench-scaling: $(VENV)/.ready-dev  ## replicas behind one ingress, and what the ingress and the proxy cost
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.scaling

bench-collecting: $(VENV)/.ready-dev  ## ways to collect activations compared with a script and the engine alone
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.activations.collecting

bench-writing: $(VENV)/.ready-dev  ## the activation store's writer compared with the raw disk
	$(BIN)/python -m benchmarks.activations.writing

bench-reading: $(VENV)/.ready-dev  ## training batches compared with a plain memory map
	$(BIN)/python -m benchmarks.activations.reading

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Torch is the build for CPUs where pip is configured to find one, else the index's, with CUDA's libraries on Linux.
$(VENV)/.ready: pyproject.toml locks/server.txt locks/torch.txt locks/torch-cpu.txt | $(VENV)/bin/python
	$(BIN)/python $(LOCKED) -r locks/server.txt
	$(BIN)/python $(LOCKED) -r locks/torch-cpu.txt || $(BIN)/python $(LOCKED) -r locks/torch.txt
	$(BIN)/python $(PIP) --no-index --no-build-isolation -e '.[serve]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready locks/dev.txt
	$(BIN)/python $(LOCKED) -r locks/dev.txt
	touch $@

# The clients that tests/serve_clients runs have pins of their own, hence an environment of their own.
# uv takes a tenth of pip's time. It does not read pip's settings: if it fails, pip installs.
.venv-clients/.ready: locks/clients.txt
	$(PYTHON) -m venv --clear .venv-clients
	$(BIN)/uv pip install --quiet --python .venv-clients --no-deps --require-hashes -r $< \
		|| .venv-clients/bin/python $(LOCKED) -r $<
	touch $@

clean:  ## take away what was set up
	rm -rf $(VENV) .venv-clients build .coverage .coverage.* *.egg-info .mypy_cache .pytest_cache .ruff_cache
