# `make` lists the targets. Everything is installed into .venv and nowhere else (see scripts/setup.py).
CONFIG ?= configs/cfg.yaml
VERSION = 0.33.0
DOCS_PORT ?= 8001
ARGS ?=
PYTHONS := python3 python3.11 python3.12 python3.13 python3.14
# runs scripts/setup.py, which picks the interpreter for .venv ($(PYTHON), or the first suitable one)
SYSTEM_PYTHON := $(or $(firstword $(foreach p,$(PYTHONS),$(shell command -v $(p) 2>/dev/null))),$(PYTHON))
BIN := .venv/bin
export PYTHON TORCH_INDEX CFG_SERVE_DEVICE VLLM HOST PORT HAPROXY MODEL_CACHE
CHAT_MODEL := models/SmolLM2-135M-Instruct

QUIET := tests/serve/waits tests/serve/nodes

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve test survey beside drift check docs bench lock clean

help:  ## this list
	@echo "targets of cfg-serve:"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{printf "%-15s %s\n", $$1, $$2}'

setup:  ## make .venv (PYTHON=..., CFG_SERVE_DEVICE=cpu|cuda, VLLM=0.32, TORCH_INDEX=..., MODEL_CACHE=DIR if wanted)
setup-dev: DEV := --dev
setup setup-dev:
	@test -n "$(SYSTEM_PYTHON)" || { echo "No python3 was found. Install Python 3.11 to 3.14, or name yours: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(SYSTEM_PYTHON)" scripts/setup.py $(DEV)

serve: setup  ## serve $(CONFIG) until Ctrl-C (CONFIG=..., HOST=127.0.0.1, PORT=8000, HAPROXY=1)
	@exec $(BIN)/cfg-serve serve "$(CONFIG)"

# Two processes, but one for tests that measure how long the clients of a server wait.
test: setup-dev  ## run all tests (ARGS="tests/unit -x" for some)
ifeq ($(ARGS),)
	@failed=0; \
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(QUIET:%=--ignore=%) || failed=1; \
	$(BIN)/python -m pytest $(QUIET) || failed=1; exit $$failed
else
	@exec $(BIN)/python -m pytest $(ARGS)
endif

# What needs no engine and no server. It is what one runs after each change.
.PHONY: test-quick
test-quick: setup-dev  ## run the tests that need no engine: unit, contract, the simulation's seeds (4 minutes)
	@exec $(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m "not slow" tests/unit tests/contract tests/simulation

survey: setup-dev  ## play what `make test` plays only in part: architectures, paths, Ray, clients (two hours)
	@$(BIN)/python -m tools.architectures --all
	@$(BIN)/python -m pytest --survey

beside: setup-dev  ## run contract tests and the simulation on another vLLM, without a GPU (VERSION=..., ARGS=tests)
	@$(BIN)/python scripts/versions/beside.py $(VERSION) -m pytest -n 2 --no-loadscope-reorder $(or $(ARGS),tests/contract tests/simulation)

drift: setup-dev  ## what another vLLM changes of what we use, and which tests pass (VERSION=..., ARGS="--tests ...")
	@$(BIN)/python scripts/versions/drift.py $(VERSION) $(ARGS)

check: setup-dev  ## lint, formatting, types, layers, the pages, and that what is installed is what is pinned
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs.py
	$(BIN)/python scripts/audit.py

docs: setup-dev  ## build the pages as a site, and serve it on 127.0.0.1:8001 until Ctrl-C (DOCS_PORT=...)
	@exec $(BIN)/python scripts/docs.py --serve $(DOCS_PORT)

bench: setup  ## run a short set of the benchmarks (python -m benchmarks.engine.decode: one of them, longer)
	@$(BIN)/python -m benchmarks

.PHONY: dist
dist: setup  ## build the wheel and the sdist into dist/
	@$(BIN)/python scripts/dist.py

lock: setup  ## compile requirements/*.in into the pinned lists
	@$(BIN)/python scripts/lock.py

.PHONY: pages
pages: setup-dev  ## write the pages that come from the code, and the Grafana dashboard
	@$(BIN)/python scripts/pages/write.py

clean:  ## remove .venv, every cache, and the chat model but for what is in MODEL_CACHE
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf $(CHAT_MODEL) models/.SmolLM2-* models/.real-size  # of a link, only the link
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
