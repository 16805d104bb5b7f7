# Each target sets up what it needs; nothing is installed twice.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
READY_DEV = $(VENV)/.ready-dev
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
INSTALL = $(PIP) -c constraints.txt -e

.PHONY: help demo test lint format docs bench package clean

help:
	@echo "make demo    the whole method on embedded images, in a few minutes"
	@echo "make test    ruff, mypy, pytest"
	@echo "make lint    ruff and mypy only; 'make format' to reformat"
	@echo "make docs    the site of docs/, with warnings as errors, in site/"
	@echo "make package sdist and wheel, checked and installed in an environment of their own"
	@echo "make bench   the full comparison on both embedded suites (about an hour on 2 cores)"

$(READY): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing mergetta with what it needs (once)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[torch,bench]'
	@touch $@

$(READY_DEV): $(READY)
	@echo "==> installing the development tools (once)"
	$(INSTALL) '.[torch,bench,export,hub,postgres,s3,ray,docs,dev]'
	@# timm imports torchvision, which of CUDA does not import beside torch of CPU: this is the last that does
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(PIP) --no-deps torchvision==0.16.2
	@touch $@

demo: $(READY)
	$(BIN)/mergetta demo

test: lint
	@echo "==> pytest"
	$(BIN)/pytest

lint: $(READY_DEV)
	@echo "==> ruff, mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	$(BIN)/mergetta bench fashion-bn --json runs/fashion-bn.json --html runs/fashion-bn.html
	$(BIN)/mergetta bench fashion-vit --json runs/fashion-vit.json --html runs/fashion-vit.html

package:
	$(PYTHON) scripts/check_package.py

clean:
	rm -rf $(VENV) build dist site *.egg-info src/*.egg-info
