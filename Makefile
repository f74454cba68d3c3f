# Needs only python3 (3.11 or newer), pip and make. `make` alone lists the targets.
#
#   TORCH_INDEX   extra package index for torch, empty by default. On Linux the plain index
#                 serves the CUDA build (gigabytes); for the CPU build say
#                     make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   PYTHON        interpreter that makes the environment (default: python3)
#   PYTEST_ARGS   what pytest runs and how, e.g. PYTEST_ARGS="tests/unit -x"
#   PART          of test-all, one part of several that take as long, e.g. PART=1/3
#   PROGRAMS_DIR  where clones of other people's programs are, for test-programs
#   VERSIONS      which ones, for versions, e.g. VERSIONS="--python 3.13 --torch 2.14.1"
#   PROGRAMS      parts of their names, and options, e.g. PROGRAMS="nanoGPT --worlds 2"
#
# pip's own settings (PIP_FIND_LINKS, PIP_INDEX_URL, pip.conf) apply as usual.

PYTHON      ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
PART        ?=
COSTS       ?=
PROGRAMS_DIR ?= runs/programs/sources
PROGRAMS    ?=
VERSIONS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PLANE := $(VENV)/.plane
PYTEST := $(BIN)/python -m pytest -q -rfER $(if $(COSTS),--costs $(COSTS)) --durations 10
PARALLEL := $(PYTEST) -n auto --maxprocesses 8 --dist worksteal
REST := $(if $(PART),--part $(PART))
# where tests are that measure, or wait for a short time limit (tests/unit/repository/test_tiers.py)
ALONE := tests/conformance tests/faults tests/process lab/tests
PIP   := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup test test-lab test-all test-costs test-programs versions demo docs pages check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP) $(PLANE) ## make .venv and install foreprop into it, with the development tools

test: $(STAMP) $(PLANE) ## run the tests that every change needs (lab/docs/tests.md says how long they take)
ifeq ($(PYTEST_ARGS),)
	$(PARALLEL) -m 'not long and not alone'
	@# its device changes torch for the whole process
	$(PARALLEL) -m 'not long and not alone' tests/lagging
else
	$(PYTEST) $(PYTEST_ARGS)
endif

test-lab: $(STAMP) $(PLANE) ## run the tests of the lab, the simulator, experiments and benchmarks
	$(PARALLEL) -m 'not long and not alone' lab/tests

test-all: $(STAMP) $(PLANE) ## run what both leave out: long tests, and the second architecture
	$(PARALLEL) $(REST) -m 'long and not alone' tests lab/tests
	$(PARALLEL) $(REST) -m 'long and not alone' tests/lagging
	@# who carries slices where the native plane does not: the Python plane
	FOREPROP_PLANE=python $(PARALLEL) $(REST) -m 'not long and not alone' \
	    --ignore-glob '*/test_shard_*.py' tests/conformance
	@# what must hold for every architecture, once more over collectives; loaders open no session
	FOREPROP_ARCHITECTURE=ring $(PARALLEL) $(REST) -m 'not alone' \
	    --ignore-glob '*/test_shard_*.py' tests/conformance
	$(PYTEST) $(REST) -m alone $(ALONE)
	$(PYTEST) $(REST) -m alone tests/lagging

test-costs: $(STAMP) $(PLANE) ## record what each test costs in tests/costs.csv, and the dearest in docs
	rm -f runs/costs.jsonl
	$(MAKE) test test-lab test-all COSTS=runs/costs.jsonl
	$(BIN)/python -m tests.costs runs/costs.jsonl

test-programs: $(STAMP) ## run other people's training programs beside DDP (lab/docs/programs.md)
	@[ -d $(PROGRAMS_DIR)/site ] || $(PIP) install -q --no-deps --target $(PROGRAMS_DIR)/site \
	    -r tests/programs/requirements.txt
	PROGRAMS_DIR=$(PROGRAMS_DIR) $(BIN)/python -m tests.programs $(PROGRAMS)

versions: $(STAMP) ## run the tests with other Pythons and torches (docs/versions.md)
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python scripts/versions.py $(VERSIONS)

demo: $(STAMP) $(PLANE) ## train on an emulated cluster on this machine and show what happened
	$(BIN)/foreprop demo

docs: $(STAMP) ## build the documentation into runs/site, the lab's into runs/site/lab
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file lab/mkdocs.yml
	@echo 'To read it with its search: python3 -m http.server --directory runs/site'

pages: $(STAMP) ## write anew what the documentation has from the code
	$(BIN)/python scripts/settings_page.py
	$(BIN)/python scripts/combinations_page.py
	$(BIN)/python scripts/commands_page.py

check: $(STAMP) $(PLANE) ## lint, format, types and unit tests, in about a minute
	scripts/check

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "foreprop needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@# Debian ships python3 without ensurepip unless python3-venv is there: then borrow its pip.
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv $(VENV); \
	else \
	    $(PYTHON) -m venv --without-pip $(VENV) \
	    && $(PYTHON) -m pip --python $(VENV)/bin/python install -q pip; \
	fi

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing foreprop, torch and the tools into $(VENV); the first time this takes minutes ..."
	@$(PIP) install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    -c constraints.txt -e '.[dev]' -e ./lab
	@touch $@

# without a compiler Python carries what the plane would, and foreprop says so
$(PLANE): hatch_build.py $(wildcard src/foreprop/engine/native/*pp) | $(STAMP)
	@$(BIN)/python hatch_build.py || true
	@touch $@
