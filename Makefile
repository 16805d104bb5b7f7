# Each target sets up what it needs; nothing is installed twice.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: help demo test lint format bench clean

help:
	@echo "make demo    the whole method on embedded images, in a few minutes"
	@echo "make test    ruff, mypy, pytest"
	@echo "make lint    ruff and mypy only; 'make format' to reformat"
	@echo "make bench   the full comparison on both embedded suites (about an hour on 2 cores)"

$(READY): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing mergetta with what it needs (once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,bench,dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/mergetta demo

test: lint
	@echo "==> pytest"
	$(BIN)/pytest

lint: $(READY)
	@echo "==> ruff, mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/mergetta bench fashion-bn --json runs/fashion-bn.json --html runs/fashion-bn.html
	$(BIN)/mergetta bench fashion-vit --json runs/fashion-vit.json --html runs/fashion-vit.html

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
