# `make demo` and `make test` are all one needs. Each makes .venv first, if it is missing or stale.
# PYTHON names the Python that .venv is made with; `make clean` before changing one's mind.

PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-triton check bench notebooks docs setup clean

help:
	@echo "make demo      train on handwritten digits with one algorithm after another, four ranks on this machine"
	@echo "make test      the tests, in about a quarter of an hour on two cores"
	@echo "make test-all  the slow ones too"
	@echo "make test-triton  kernels compile with the oldest Triton that is supported, too"
	@echo "make check     format, lint and types"
	@echo "make bench     the benchmarks"
	@echo "make notebooks run the notebooks and keep what they show"
	@echo "make docs      the documentation, in docs/_build/html"
	@echo "make clean     remove .venv and everything else that git ignores"

demo: setup
	@OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc_per_node=4 examples/digits.py $(ARGS)

test: setup
	@scripts/test $(ARGS)

test-all: setup
	@scripts/test -m "" $(ARGS)

test-triton: setup
	@scripts/oldest-triton $(ARGS)

check: setup
	@scripts/check

bench: setup
	@scripts/test --benchmark $(ARGS)

notebooks: setup
	@.venv/bin/python notebooks/execute.py $(ARGS)

docs: setup
	@scripts/docs

setup:
	@scripts/setup

clean:
	rm -rf .venv .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist baguakit.egg-info docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
