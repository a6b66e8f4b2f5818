# `make demo` and `make test` are all one needs. Each makes .venv first, if it is missing or stale.
# PYTHON names the Python that .venv is made with; `make clean` before changing one's mind.

PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-third test-triton test-versions check bench notebooks docs wheel setup clean

help:
	@echo "make demo      train on printed digits with one algorithm after another, four ranks on this machine"
	@echo "make test      the tests, in about four minutes on two cores"
	@echo "make test-all  the slow ones too"
	@echo "make test-third  a third of the slow ones, another every day; THIRD=1, 2 or 3 chooses"
	@echo "make test-triton  kernels compile with the oldest Triton that is supported, too"
	@echo "make test-versions  tests in environments of other versions of Python, torch, triton and numpy"
	@echo "make check     format, lint and types"
	@echo "make bench     the benchmarks"
	@echo "make notebooks run the notebooks and keep what they show"
	@echo "make docs      the documentation, in docs/_build/html"
	@echo "make wheel     the sdist and the wheel, in dist, built, checked and tried"
	@echo "make clean     remove .venv and everything else that git ignores"

demo: setup
	@.venv/bin/python -m baguakit demo --all --out digits.png $(ARGS)

test: setup
	@scripts/test $(ARGS)

test-all: setup
	@scripts/test -m "" $(ARGS)

test-third: setup
	@scripts/test -m slow --third $(or $(THIRD),today) $(ARGS)

test-triton: setup
	@.venv/bin/nox --session triton -- $(ARGS)

test-versions: setup
	@.venv/bin/nox $(ARGS)

check: setup
	@scripts/check

bench: setup
	@scripts/test --benchmark bench $(ARGS)

notebooks: setup
	@scripts/test -m "" --overwrite $(or $(ARGS),notebooks)

docs: setup
	@scripts/docs

wheel: setup
	@scripts/wheel

setup:
	@scripts/setup

clean:
	rm -rf .venv .benchmarks .hypothesis .mypy_cache .ptx_cache .pytest_cache .ruff_cache build dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
