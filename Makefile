# Each target makes .venv and installs what it needs: Python 3.11 or later and make are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-all lint clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[ray,test,dev]"
	@touch $@

demo: $(STAMP)
	rm -rf build/demo build/demo.*
	$(BIN)/shardflow run tests/assets/tiny-v3 build/demo --mp 2 --weights bf16 \
		--prompt "When shall we three meet again? In thunder, lightning, or in rain?"

test: $(STAMP)
	$(BIN)/pytest -m "not long and not gpu"

test-all: $(STAMP)
	$(BIN)/pytest -m "not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build $(VENV)
