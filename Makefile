# Everything runs from .venv in this folder; only Python 3.10+, git and make are needed beforehand.
# Programs are called as modules: the scripts of an environment break when its path has a space.
PYTHON ?= python3
RANKS ?= 4
WORKERS ?= 2
PYTEST_ARGS ?=

PY := .venv/bin/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

demo: .venv/.installed-examples ## set up, then serve CartPole from one rank to the others
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --nproc-per-node $(RANKS) \
		examples/serve_cartpole.py

test: lint ## set up, then lint, check types and run the tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

lint: .venv/.installed-dev ## set up, then lint and check types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: .venv/.installed-bench ## set up, then run the benchmarks
	OMP_NUM_THREADS=1 $(PY) -m benchmarks

clean: ## remove the environment and what tools left behind
	rm -rf .venv build dist meshinfer.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.created:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo 'make: "$(PYTHON)" is not Python 3.10 or newer; name one: make PYTHON=python3.12' >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || { \
		echo 'make: "$(PYTHON)" lacks venv; install it (Debian, Ubuntu: apt-get install python3-venv)' >&2; \
		exit 1; }
	"$(PYTHON)" -m venv .venv
	@touch $@

# Remade when what it depends on changes, so a second run starts at once.
.venv/.installed-%: .venv/.created pyproject.toml constraints.txt
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@
