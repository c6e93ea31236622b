# Nothing but make, Python 3.11 and the package registry is needed: tools/env makes what the targets run in.
SHELL := /bin/bash
RELEASES ?= 0.5.11 0.5.23
DEMO_RELEASE ?= 0.5.11
PYTEST_ARGS ?=
MATRIX_ARGS ?=

# Where this is set, every process compiles SGLang and torch anew, a minute of CPU time each.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
ENV = $(or $(PYTHON),$(error No Python on PATH: install Python 3.11 and try again)) tools/env

.DEFAULT_GOAL := help
.PHONY: help demo test test-all matrix lint env bench release-check clean

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

demo: ## the crash and the cure, on four CPU stages of the real server
	@python="$$($(ENV) $(DEMO_RELEASE))" && "$$python" -m sglang_pp_mla.cli demo

test: ## all but the longest, on each of RELEASES; what takes minutes, on one of them
	@PYTHON="$(PYTHON)" PYTEST_ARGS="$(PYTEST_ARGS)" tools/test "not longest" $(RELEASES)

test-all: ## all tests
	@PYTHON="$(PYTHON)" PYTEST_ARGS="$(PYTEST_ARGS)" tools/test "longest or not longest" $(RELEASES)

bench: ## start-up, arming and decode steps, with and without this package
	@for release in $(RELEASES); do \
		python="$$($(ENV) $$release)" && "$$python" -P benchmarks/overhead.py || exit; \
	done

matrix: ## the real engine on release after release, stock and ours, into docs/data/matrix.json (about 45 minutes)
	@python="$$($(ENV) 0.5.23)" && "$$python" -P tools/matrix $(MATRIX_ARGS)

lint: ## ruff, mypy and the rules of the house
	@python="$$($(ENV) lint)" && bin="$${python%/*}" && status=0; \
	for check in "ruff check" "ruff format --check" "mypy" "lint-imports --no-logo"; do \
		printf '\n=== %s ===\n' "$$check"; "$$bin"/$$check || status=1; \
	done; exit $$status

release-check: ## build what a release uploads, twice, and try it without SGLang; uploads nothing (some minutes)
	@python="$$($(ENV) publish)" && "$$python" tools/release

env: ## make the environments, and print their interpreters
	@for release in $(RELEASES); do $(ENV) $$release || exit; done

clean: ## delete what the targets left in the clone; `tools/env --remove RELEASE` deletes an environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
