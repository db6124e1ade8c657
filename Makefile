# Each command makes its own environment in .venv.
#   make run      pack the submission, load it as the contest does, train and score it on the official data
#   make test     ruff, mypy --strict and pytest
# For contributors:
#   make hooks    install the hooks of pre-commit, which use .venv and need no network
#   make docs     build the site in docs/_build/html: warnings are errors, links are checked
#   make wheel    build a wheel, install it without extras into a bare environment and run an example there
#   make contest-versions  evaluate the packed entry with torch 2.2.2, 2.3.1, 2.4.1 and the newest (20 GB, kept in a cache)
#   make lowest   run the core tests with the lowest version of each dependency
#   make promises measure what README and the guides promise, beside limits
#   make pythons  run the core tests with each installed Python of the supported range
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test hooks docs wheel contest-versions lowest promises pythons clean

run: $(VENV)/.installed
	$(BIN)/python -m analysis contest

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

hooks: $(VENV)/.installed
	$(BIN)/pre-commit install

# A full build each time removes pages of deleted sources and shows all warnings.
docs: $(VENV)/.installed
	rm -rf docs/_build docs/reference/methods.md docs/reference/commands.md docs/results
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --jobs auto docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

wheel: $(VENV)/.installed
	PYTHON=$(BIN)/python .ci/wheel

contest-versions: $(VENV)/.installed
	.ci/contest-versions

lowest:
	.ci/pythons 3.10

promises: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m analysis promises

pythons:
	.ci/pythons

# Debian ships Python without ensurepip unless python3-venv is installed; virtualenv works as well. The tests also run
# with the packages of single studies (dask, bench, easyfsl).
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or newer is needed; set PYTHON=python3.x" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || { echo "make: cannot make an environment; try: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,dask,bench]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps easyfsl==1.5.0
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build docs/reference/methods.md docs/reference/commands.md docs/results
