# Two commands, each with all its own set-up:
#   make run      pack the submission, load it as the contest does, train and score it on the official data
#   make test     ruff, mypy --strict and pytest
# And for those who work on it:
#   make docs     the site, in docs/_build/html: warnings are errors, links are checked
#   make wheel    a wheel, installed without extras into a bare environment, and an example that runs there
#   make pythons  the core of the tests with each Python of the claimed range that is at hand
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test docs wheel pythons clean

run: $(VENV)/.installed
	$(BIN)/python -m analysis contest

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Pages of names that are gone must not be left over, and all warnings be seen: built anew each time.
docs: $(VENV)/.installed
	rm -rf docs/_build docs/reference/methods.md docs/reference/commands.md docs/results
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --jobs auto docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

wheel: $(VENV)/.installed
	PYTHON=$(BIN)/python .ci/wheel

pythons:
	.ci/pythons

# Debian ships Python without ensurepip unless python3-venv is there; virtualenv serves as well.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or newer is needed; set PYTHON=python3.x" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || { echo "make: cannot make an environment; try: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps easyfsl==1.5.0  # a peer to compare with
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info docs/_build docs/reference/methods.md docs/reference/commands.md docs/results
