# Two commands, each with all its own set-up:
#   make run    pack the submission, load it as the contest does, train and score it on the official data
#   make test   ruff, mypy --strict and pytest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test clean

run: $(VENV)/.installed
	$(BIN)/python -m analysis contest

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Debian ships Python without ensurepip unless python3-venv is there; virtualenv serves as well.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or newer is needed; set PYTHON=python3.x" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || { echo "make: cannot make an environment; try: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps easyfsl==1.5.0  # a peer to compare with
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
