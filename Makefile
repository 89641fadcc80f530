# Every target makes .venv itself when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint types build clean

help:
	@echo "make demo   build the embedded models, ask about a picture, write demo.html: what each token read"
	@echo "make test   run the tests (PYTEST_ARGS='-m \"not slow\"' for a quick run)"
	@echo "make lint   ruff check and ruff format --check"
	@echo "make types  mypy --strict on oval_core and oval_spec"
	@echo "make build  source distribution and wheel in dist/"
	@echo "make clean  remove build outputs and caches (keeps $(VENV))"

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "OVAL needs Python 3.11 or newer, but '$(PYTHON)' is missing or is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing into $(VENV) (torch is large; the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q torch torchvision
	@$(PIP) install -q -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/oval models build smol
	$(BIN)/oval demo --html demo.html

test: $(STAMP)
	$(BIN)/oval models build smol
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

build: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
