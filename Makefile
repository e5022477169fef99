# The commands of the README. Each sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin

# sys.monitoring, with which test selection records there, came with Python 3.12.
PYTHON312 ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$python" && break; done)
BIN312 := .venv312/bin

.PHONY: help venv venv312 demo test test312 nightly styles releases lint bench curve docs release clean

help:
	@echo "make demo    from a planted silent bug to the commit that planted it, in about two minutes"
	@echo "make test    the whole test suite"
	@echo "make test312 the tests of test selection under Python 3.12, in an environment without torch"
	@echo "make nightly what need not run with each change: styles, releases, every check of the museum, tests marked nightly"
	@echo "make styles  the correct trainers of the tests under 20 seeds, which accuse nobody"
	@echo "make releases two or more older releases of TRL, verl and torchrl each, installed into temporary folders, in some eight minutes of CPU time"
	@echo "make lint    ruff, mypy, import rules, shellcheck"
	@echo "make bench   the benchmarks, each against a peer in the same run"
	@echo "make curve   train examples/arithmetic.yaml and draw its curve for the README, in some minutes"
	@echo "make docs    write the generated pages and counts anew and build the site in build/site"
	@echo "make release build sdist and wheel in dist/, install them into bare environments of each Python, play the demo from them"
	@echo "make venv    only set up .venv"

venv: .venv/ready

.venv/ready: requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rlcanary needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	# pip would compile file after file, their tests too. Some packages bring templates that are no Python.
	@$(BIN)/python -m compileall -qq -j 0 -x /tests/ .venv/lib || true
	@touch $@

venv312: .venv312/ready

.venv312/ready: requirements/selection.in requirements/cpu.txt pyproject.toml
	$(PYTHON312) -m venv .venv312
	$(BIN312)/python -m pip install --quiet --requirement requirements/selection.in --constraint requirements/cpu.txt
	$(BIN312)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: venv
	@$(BIN)/python tools/demo/play.py

# The suite starts hundreds of processes. Where Python is told to write no bytecode, each of them would compile rlcanary, and
# pytest rewrite its plugins, anew: this writes the bytecode once.
# Four workers, since tests also wait, of one thread each: those of torch would wait for each other on two cores.
# Files run in the order of their folders, the long ones of tests/integration first, so that no worker ends on one.
test: venv
	@$(BIN)/python -m compileall -q harness plugins
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only tests/unit/test_waiting.py >/dev/null
	@PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 60 --durations-min 5

test312:
ifeq ($(PYTHON312),)
	@echo "there is no Python 3.12 here, so test selection is not tested under it; set PYTHON312=/path/to/python3.12" >&2
else
	@$(MAKE) --no-print-directory venv312
	@$(BIN312)/python -m pytest -n 2 --dist loadfile tests/unit/selection tests/integration/selection
endif

styles: venv
	@RLCANARY_STYLE_SEEDS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit/checks/styles/test_styles.py tests/unit/checks/styles/test_state_styles.py

# What need not run with each change: every check that catches a bug of the museum, older releases, more variants and seeds.
nightly: venv styles
	@RLCANARY_MUSEUM=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit/bugs/test_museum.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nightly -m nightly tests

releases: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nightly tests/nightly/test_older_releases.py

lint: venv
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

bench: venv
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

curve: venv
	rm -rf runs/arithmetic
	$(BIN)/rlcanary train examples/arithmetic.yaml
	$(BIN)/python tools/learning_curve.py docs/arithmetic.svg runs/arithmetic

docs: venv
	$(BIN)/python tools/write_docs.py
	$(BIN)/python -m mkdocs build --strict --quiet

# Bare environments of each Python that is here; the tests check contents and metadata alone.
RELEASE_PYTHONS ?= $(wildcard $(foreach minor,11 12 13,$(firstword $(wildcard $(HOME)/.pyenv/versions/3.$(minor).*/bin/python))))

release: venv
	$(BIN)/python tools/release.py $(foreach python,$(RELEASE_PYTHONS),--install $(python)) --torch

clean:
	rm -rf .venv .venv312 build dist
