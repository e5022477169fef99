# The commands of the README. Each sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help venv demo test lint bench clean

help:
	@echo "make demo    from a planted silent bug to the commit that planted it, in about two minutes"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff, mypy, import rules, shellcheck"
	@echo "make bench   the benchmarks, each against a peer in the same run"
	@echo "make venv    only set up .venv"

venv: .venv/ready

.venv/ready: requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rlcanary needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: venv
	@$(BIN)/python tools/demo/play.py

test: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile

lint: venv
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

bench: venv
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv build dist
