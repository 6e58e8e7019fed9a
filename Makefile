# `make demo` and `make test` work from a bare clone: they need Python 3.10-3.13, make and g++.
# The packages go into the active virtual environment, or into .venv when none is active.

.PHONY: demo test test-full test-wheel wheel lint format bench docs site clean tools help
.DEFAULT_GOAL := help
SHELL := /bin/bash
# Else each process compiles the thousands of modules of torch and TVM anew, for six seconds.
unexport PYTHONDONTWRITEBYTECODE

VENV := $(or $(VIRTUAL_ENV),.venv)
PYTHON := $(VENV)/bin/python
# Modules are compiled when they are first imported, which most of torch's and transformers' never are.
INSTALL := $(PYTHON) -m pip install -q --no-compile
# The first Python that the wheels of torch and TVM exist for; say `make BASE_PYTHON=...` for another.
BASE_PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)

# The plain `torch` of PyPI brings gigabytes of CUDA libraries on Linux. `make TORCH=cuda` takes it.
TORCH ?= cpu
TORCH_VERSION := 2.13.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Most of a test is compilation, on one core; a process needs up to 4 GB. `make JOBS=1 test` has one.
JOBS ?= 2
PARALLEL := $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile)

help:
	@echo "make demo       fine-tune a small Llama on the source code of Python itself (some minutes)"
	@echo "make test       the fast tier of tests; make test-full runs everything"
	@echo "make test-wheel build a wheel and train from it without a compiler (3 minutes)"
	@echo "make lint       ruff, pyright and the direction of imports; make format rewrites"
	@echo "make bench      training steps next to eager PyTorch and torch.compile"
	@echo "make site       the documentation as web pages, in build/site"
	@echo "make docs       the pages that are made from the code and from results"

$(PYTHON):
	@test -n "$(BASE_PYTHON)" || { echo "No Python 3.10 to 3.13 found; set BASE_PYTHON"; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.relax-disc-torch: | $(PYTHON)
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.__version__.startswith("2.13."))' \
		2>/dev/null; then echo "torch 2.13 is installed already"; \
	elif [ $(TORCH) != cpu ]; then $(INSTALL) torch==$(TORCH_VERSION); \
	else $(INSTALL) torch==$(TORCH_VERSION)+cpu 2>/dev/null \
		|| $(INSTALL) --index-url $(TORCH_INDEX) torch==$(TORCH_VERSION) \
		|| $(INSTALL) torch==$(TORCH_VERSION); fi
	@touch $@

# One stamp for each set of extras, so that the demo does not install the linters.
$(VENV)/.relax-disc-%: pyproject.toml | $(VENV)/.relax-disc-torch
	$(INSTALL) -e ".[$(subst +,$(comma),$*)]"
	@touch $@

comma := ,
DEMO := $(VENV)/.relax-disc-demo
TEST := $(VENV)/.relax-disc-demo+hf+test
FULL := $(VENV)/.relax-disc-demo+docs+hf+lightning+plot+test+tune
LINT := $(VENV)/.relax-disc-demo+hf+lightning+lint+plot+test

# What lint and tests need, in one installation: LINT's extras contain TEST's.
tools: $(LINT)
	@touch $(TEST)

demo: $(DEMO)
	$(PYTHON) -m relax_disc train
	$(PYTHON) tutorials/memory_budget.py
	$(PYTHON) tutorials/padding.py

test: $(TEST)
	$(PYTHON) -m pytest -q -m "not slow" $(PARALLEL)

# Train from a wheel for this processor where there is no compiler; WHEEL=<folder of `make wheel`>.
test-wheel: $(TEST)
	RELAX_DISC_WHEEL="$(WHEEL)" $(PYTHON) -m pytest -q tests/test_packaging_wheel.py -k one_instruction

# A wheel for this processor alone, and its library in lib/: make WHEEL=<folder> wheel.
wheel: $(TEST)
	@test -n "$(WHEEL)" || { echo "Say where: make WHEEL=<folder> wheel"; exit 1; }
	$(PYTHON) -m tests.wheels "$(WHEEL)"

test-full: $(FULL)
	HYPOTHESIS_PROFILE=full $(PYTHON) -m pytest -q $(PARALLEL)

lint: $(LINT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)
	$(VENV)/bin/lint-imports

format: $(LINT)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: $(TEST)
	$(PYTHON) -m benchmarks.operators.document > docs/operators.md.new
	mv docs/operators.md.new docs/operators.md
	$(PYTHON) -m benchmarks.models --write-docs

site: $(VENV)/.relax-disc-docs+hf
	$(PYTHON) -m sphinx -q -W -b html docs build/site
	@echo "build/site/index.html"

bench: $(DEMO)
	$(PYTHON) -m benchmarks.training

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
