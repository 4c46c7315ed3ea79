# Two commands: `make serve` and `make test`. Both make the environment first; both may be repeated.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: serve test check bench clean

serve: $(STAMP)
	@exec $(BIN)/paceline serve $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m common.model.catalog smollm2-135m-instruct >/dev/null
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m bench $(ARGS)

$(STAMP): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed and $(PYTHON) was not found: install it, or name it with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar on -r requirements.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
