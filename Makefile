# Everstep. `make help` lists the targets; each installs what it needs into .venv from requirements/lock.txt.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.NOTPARALLEL:

PY := .venv/bin/python
ARGS ?=
CODE := src tests examples benchmarks scripts

.PHONY: help venv demo test check format bench lock hooks clean distclean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

venv: ## make .venv (minutes the first time, instant afterwards)
	@scripts/venv.sh

demo: venv ## train a small GPT on real text while a worker is killed under it
	@$(PY) examples/demo.py $(ARGS)

test: venv ## all tests; make test ARGS="-k hang" for some
	@scripts/test.sh $(ARGS)

check: venv ## lint, format, types, layers, size budget
	@scripts/check.sh

format: venv ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix $(CODE)
	@$(PY) -m ruff format $(CODE)

bench: venv ## the benchmarks, short form; ARGS replaces --quick
	@$(PY) benchmarks/run.py $(or $(ARGS),--quick)

lock: venv ## renew requirements/lock.txt
	@scripts/lock.sh

hooks: venv ## install the git hooks of .pre-commit-config.yaml
	@$(PY) -m pip install -qq --requirement requirements/hooks.txt
	@.venv/bin/pre-commit install

clean: ## remove caches, everstep_runs and checkpoints
	@rm -rf build dist everstep_runs checkpoints .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and .venv too
	@rm -rf .venv
