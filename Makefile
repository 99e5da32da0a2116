# Set-up and the main jobs; everything is installed into .venv.
#   make demo    train a GPT with zero3 on two CPU ranks and print what it cost
#   make test    the tests
#   make lint    ruff and mypy --strict

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py zero=stage3 compare=[ddp]

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv outputs build dist *.egg-info
