# Every target works in a clean clone; those that need the virtual environment make it first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: ## Make .venv with the project and its development tools; refreshed when pyproject.toml changed
	@python=$$(scripts/pythons default) && scripts/make-venv .venv "$$python"

.PHONY: lint
lint: venv ## Check style, types and the directions of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: venv ## Format the code and apply the safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: test
test: lint ## Check everything: lint, all tests, the unit tests on every other installed Python
	@failed=0; $(BIN)/python -m pytest || failed=1; scripts/test-pythons || failed=1; exit $$failed

.PHONY: test-deps
test-deps: ## Install the system programs the tests use (root; Debian, Ubuntu)
	@scripts/install-test-deps

.PHONY: bench
bench: venv ## Measure the agent's cost
	$(BIN)/python -m tests.perf.bench

.PHONY: demo
demo: venv ## Show the agent at work on a simulated node, http://127.0.0.1:9753; ARGS="--scenario list" and the like
	@exec $(BIN)/hpcwatch demo $(ARGS)

.PHONY: clean
clean: ## Remove all that these targets make
	rm -rf .venv .venvs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist bench.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
