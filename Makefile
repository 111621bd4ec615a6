# Every target sets up what it needs: a virtual environment in .venv with the package and its dev extra.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
# Interpreters, each with a version of torch; the least and the newest that are supported.
VERSIONS ?= python3.10=2.6 python3.12=newest

.PHONY: help setup docs docs-serve demo test test-rare test-versions test-gpu coverage check format release-check report bench bench-gpu clean

help:
	@echo "make demo      train the paper's MLP on handwritten digits with four normalizations and write a report"
	@echo "make test      run the tests"
	@echo "make test-rare run those that take long and seldom break, such as compiling kernels for other GPUs"
	@echo "make test-versions run the core's tests with the oldest and the newest supported torch; VERSIONS=... for others"
	@echo "make coverage  run the tests and show which lines and branches of the package they reach; pages in coverage/"
	@echo "make check     lint, formatting and types"
	@echo "make test-gpu  run the tests that need a CUDA device, from the tree, with the system's torch"
	@echo "make report    write docs/reproduction.md and .html, and the README's table, from the results of experiments"
	@echo "make bench     time the layers on this machine's CPU"
	@echo "make bench-gpu time the layers and a training step on a CUDA device, from the tree, with the system's torch"
	@echo "make docs      build the site in docs/_build/html and check its links; make docs-serve shows it on port 8000"
	@echo "make release-check build wheel and sdist, and try them in a clean environment outside of the source"
	@echo "make format    rewrite the code in the project's format"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

setup: $(STAMP)

demo: setup
	$(BIN)/iternorm demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not rare"

test-rare: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m rare

test-versions:
	$(PYTHON) tests/helpers/versions.py $(VERSIONS)

release-check: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python tests/helpers/release.py

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -n 14 --dist worksteal -p no:benchmark -p no:cacheprovider tests

coverage: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not rare" --cov --cov-report term --cov-report html

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# Pages are read anew each time, because their tables come from files that Sphinx does not know; the gallery runs what changed.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -b html -E -W --keep-going -q docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 8000

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: setup
	$(BIN)/iternorm report
	$(BIN)/python benchmarks/table.py results --write README.md

bench: setup
	$(BIN)/iternorm bench

bench-gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/run.py --device cuda

clean:
	rm -rf $(VENV) .versions .pytest_cache .ruff_cache .hypothesis .coverage coverage dist iternorm-demo docs/_build docs/auto_gallery
