# Two commands matter: `make demo` and `make test`, each from a bare clone.
SHELL  := bash
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
RUFF   := $(PY) -m ruff
# One thread: the tests' sizes gain nothing from more, and on a busy machine threads that wait for each other crawl.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest

# The set-up is done when this file exists; its name changes with everything that the set-up depends on.
READY  := $(VENV)/.ready-$(shell cat requirements/*.txt pyproject.toml hatch_build.py $(wildcard csrc/*.*) | cksum | tr ' ' -)
BEGUN  := $(VENV)/.begun

.PHONY: help setup demo test test-all lint format bench clean
.DEFAULT_GOAL := help

help:    ## this page
	@echo "linattn: linear attention, trained in parallel, run as a recurrent network"; echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo; echo "Each one sets itself up first. PYTHON=python3.12 make setup chooses another interpreter (3.11 or newer)."

setup: $(READY)    ## .venv with the pinned packages and linattn itself, editable
	@echo "ready: $(PY)"

demo: $(READY)    ## digits painted and completed; what an image costs beside softmax; the operator
	@$(PY) -m linattn.demo

test: $(READY)    ## the tests, at most ten minutes on two cores
	@$(PYTEST) -q

test-all: $(READY)    ## the long ones too
	@$(PYTEST) -q -m ""

lint: $(READY)    ## ruff and pyright
	@$(RUFF) check --quiet
	@$(RUFF) format --quiet --check || { echo "make format would mend that"; exit 1; }
	@$(PY) -m pyright --pythonpath $(PY)

format: $(READY)    ## put the code in form
	@$(RUFF) check --fix --quiet
	@$(RUFF) format --quiet

bench: $(READY)    ## measure this machine
	@$(PY) -m linattn.bench

clean:    ## forget everything that can be made again
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis
	find linattn tests \( -name __pycache__ -o -name '_native.*' \) -prune -exec rm -rf {} +

# A set-up that was interrupted may have left half a package that pip takes for a whole one, so it starts over.
# --no-compile: Python compiles what is imported when it is imported; all of it beforehand costs half the set-up.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "The pinned packages need Python 3.11 or newer: PYTHON=python3.12 make setup"; exit 1; }
	@if [ -e $(BEGUN) ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    echo "setup: a fresh $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(BEGUN)
	@echo "setup: the pinned packages (about 300 MB the first time, torch above all; gigabytes where torch comes with CUDA)"
	@set -o pipefail; $(PY) -m pip install --no-compile --progress-bar off -r requirements/dev.txt 2>$(VENV)/setup.err \
	    | awk '/^ *Downloading .* [MG]B\)/ { print "  " $$2, $$3, $$4; fflush() } /^Installing/ { print "  unpacking"; fflush() }' \
	    || { cat $(VENV)/setup.err; echo "setup: pip failed"; exit 1; }
	@rm $(BEGUN)
	@echo "setup: linattn itself, editable"
	@$(PY) -m pip install --quiet --no-deps --no-compile --no-build-isolation -e . 2>$(VENV)/setup.err \
	    || { cat $(VENV)/setup.err; exit 1; }
	@rm -f $(VENV)/.ready-*
	@touch $@
