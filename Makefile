# What a fresh machine needs: Python 3.10 or newer with venv, make, and a C++ compiler (torch.compile uses it).
# Everything else is installed into .venv by the first target that you ask for, torch first.
#
#   make demo                              the library on real data, in a few minutes
#   make test                              the tests that take minutes
#   make demo TORCH=torch==2.15.0          another torch, from then on: a version, a wheel, or a URL
#   make test PYTHON=python3.12            another Python

PYTHON ?= python3
VENV ?= .venv
PINNED := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(or $(shell cat $(VENV)/chosen-torch 2>/dev/null),$(PINNED))
# Processes of a test run load the same modules, with their assertions rewritten: bytecode is kept even where that is off.
export PYTHONDONTWRITEBYTECODE :=
QUIET := $(if $(CI),--quiet --progress-bar off)

BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of what is installed never is.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile $(QUIET)
# The stamp remembers which torch is installed: another one installs again.
INSTALLED := $(VENV)/installed
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(TORCH))
.PHONY: $(INSTALLED)
endif

.PHONY: help demo test matrix third-party wheel conformance compiled
.PHONY: lint types docs bench coverage format clean

help:
	@sed -n 's/^## //p' Makefile

## make demo        masked statistics, training and the three source cases on real data; plots in demo_output/
demo: $(INSTALLED)
	$(BIN)/python -m examples.demo

## make test        the fast tests: 2½ minutes on two cores. TIER=thorough: those that compile, start processes or try a
##                  law many times, 10 minutes; TIER=slow: hours. PART=K/N: a part of them
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(if $(TIER),--dist loadgroup tests/$(TIER),--dist worksteal) \
	    $(if $(PART),--part $(PART))

## make matrix      the tests with each release of torch in versions.py, in environments of their own; TORCHES="2.14.1"
TORCHES ?= $(shell sed -n 's/^TESTED = (\(.*\))/\1/p' masked_dispatch/versions.py | tr -d '",')
matrix:
	for torch in $(TORCHES); do $(MAKE) test VENV=.venv-torch-$$torch TORCH=torch==$$torch || exit 1; done

## make third-party every law on the operators of examples/third_party, a package of its own, installed
third-party: $(INSTALLED)
	$(PIP) -c $(VENV)/constraints.txt './examples/third_party[test]'
	cd examples/third_party && OMP_NUM_THREADS=1 $(abspath $(BIN))/pytest

## make wheel       the wheel and the sdist, tested in a clean environment with torch alone
wheel: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slow/house/test_wheel.py

## make conformance the laws on 4 samples of every operator; SLICE=K/N: a part of all samples, masks and dtypes
conformance: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m op_registry check $(if $(SLICE),--tier full --slice $(SLICE) --timeout 900)

## make compiled    a call of each operator in a graph, forward and backward, for sizes at hand and for any; SLICE=K/N: a part
MODES ?= aot_eager aot_eager_dynamic
compiled: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m op_registry check --tier compiled $(MODES:%=--mode %) --timeout 480 \
	    $(if $(SLICE),--slice $(SLICE))

## make lint        ruff: lint and format
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

## make types       mypy, strict
types: $(INSTALLED)
	$(BIN)/mypy

## make docs        the site of the pages in docs/ into build/site, without network
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

## make bench       every benchmark; one of them: .venv/bin/python -m benchmarks NAME
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

## make coverage    what each operator of torch means on masked tensors, by family and in total
coverage: $(INSTALLED)
	$(BIN)/python -m op_registry coverage

## make format      let ruff rewrite what it can
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make clean       everything that make made, the virtual environment included
clean:
	rm -rf $(VENV) .venv-torch-* build *.egg-info examples/third_party/build examples/third_party/*.egg-info demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	    { echo "a C++ compiler is needed for torch.compile: install g++ or clang"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) cannot make a virtual environment: install its venv package (Debian: python3-venv)"; exit 1; }
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) -c $(VENV)/constraints.txt "$(TORCH)"
	# The distribution's version: torch.__version__ may name a CUDA that the distribution's does not.
	$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >> $(VENV)/constraints.txt
	$(PIP) -c $(VENV)/constraints.txt --editable '.[dev]'
	@if [ "$(TORCH)" = "$(PINNED)" ]; then rm -f $(VENV)/chosen-torch; else echo "$(TORCH)" > $(VENV)/chosen-torch; fi
	@echo "$(TORCH)" > $@
