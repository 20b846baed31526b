# The commands of the project. Set-up is repeated by every target that needs it and does nothing when complete.

# The first of these that is there; name another one with PYTHON=/path/to/python3.11.
PYTHON ?= $(or $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name)))),python3.11)
# What pip installs as torch; empty means the pinned version from the index that pip is set up for.
TORCH_SPEC ?=
# Further settings for the demo (make demo ARGS="train.steps=200") and for pytest (make test TESTS="-m slow -x").
ARGS ?=
TESTS ?=
# Test files that run at once, each process on one thread.
JOBS ?= 2

TRAINER := .venv/bin/python
SETUP = $(PYTHON) tools/setup.py

export TORCH_SPEC
.DEFAULT_GOAL := help
.PHONY: help setup setup-trainer setup-vllm demo test lint clean python

help: ## show this text
	@echo "Speculator Trainer"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'
	@echo
	@echo '  PYTHON=...            the Python to set up with, 3.11 or newer'
	@echo '  TORCH_SPEC=...        what pip installs as torch, with its options: TORCH_SPEC="torch==2.13.0 --index-url URL"'
	@echo '                        for a CPU-only, ROCm or other build; remembered until make clean'
	@echo '  ARGS=... TESTS=...    more arguments for the demo, for pytest'
	@echo '  JOBS=2                test files that run at once'

setup: python ## make .venv (trainer) and .venv-vllm (vLLM on CPU); nothing is done when they are complete
	@$(SETUP) trainer vllm

setup-trainer: python ## make only .venv, for instance where a GPU build of vLLM is installed elsewhere
	@$(SETUP) trainer

setup-vllm: python ## make only .venv-vllm
	@$(SETUP) vllm

demo: setup ## train, export, serve and measure an EAGLE-3 drafter for a small real target
	$(TRAINER) -m trainer recipe=eagle3_smollm2 $(ARGS)

test: setup ## check the style, run the tests
	$(TRAINER) -m ruff check .
	OMP_NUM_THREADS=1 $(TRAINER) -m pytest -n $(JOBS) --dist loadfile $(TESTS)

lint: setup-trainer ## check the style
	$(TRAINER) -m ruff check .

clean: ## remove both environments and what the tools leave; runs/ stays
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
		{ echo "make: no $(PYTHON) found. Name Python 3.11 or newer: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
