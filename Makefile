# make demo   linearize a small model on this machine and show the result
# make test   lint, type check and all tests that need no GPU
# make lint   the first two alone
# Each sets up the virtual environment it needs in .venv; a second run is quick.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests run in this many processes; their libraries keep to one thread each.
JOBS ?= auto

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python -m lolcats.demo --output demo --model-folder .model

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Without an NVIDIA GPU the CPU build of torch spares gigabytes; where that index is out of reach, any build does.
$(VENV)/.torch: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  $(BIN)/python -m pip install --quiet torch; \
	else \
	  $(BIN)/python -m pip install --quiet --timeout 15 --retries 1 torch --index-url https://download.pytorch.org/whl/cpu \
	  || $(BIN)/python -m pip install --quiet torch; \
	fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) demo .model
