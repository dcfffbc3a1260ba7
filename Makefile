# `make demo` and `make test` set themselves up; everything else is listed by `make help`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help demo test quick-test contract lint style types docs docs-test export-matrix browser-test parity compile-all bench bench-full costs reproduce counts clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt $(wildcard mixlab/engine/kernels/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED) ## which mixer for the embedded digits: trains seven small models, offline (2 cores, 6 to 12 minutes)
	$(BIN)/mixlab compare '*_pico' --data digits --recipe digits --jobs 2 --workers 0 --no-tensorboard --out runs/demo

lint: style types ## ruff and mypy

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

test: style ## ruff, then mypy beside every quick test (2 cores, 7 to 26 minutes with set-up)
	@$(MAKE) --no-print-directory --jobs 2 types quick-test

quick-test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not heavy and not browser"

contract: $(INSTALLED) ## every mixer in blocks and models beside double precision, at every width of the kernels (2 cores, 3 minutes)
	$(BIN)/python -m pytest -m "heavy or not heavy" tests/models/mixers

docs: $(INSTALLED) ## the site, into site/; warnings are errors
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/zensical build --clean --strict

docs-test: $(INSTALLED) ## every command and example of the docs; those of the papers' tables with tiny models (2 cores, 15 minutes)
	$(BIN)/python -m pytest -n 2 tests/test_docs.py tests/test_examples.py tests/tools/test_reproduce_runs.py

export-matrix: $(INSTALLED) ## models in every export format, compared and timed, into docs/export.md (g++, 20 minutes)
	$(BIN)/python benchmarks/export_matrix.py --full

browser-test: $(INSTALLED) ## the pages in a headless Chromium, which it finds or gets (70 MB)
	$(BIN)/python -m tests.browser.chromium
	$(BIN)/python -m pytest -m browser -rs tests/browser

parity: $(INSTALLED) ## every model at full size beside timm, forward and backward, and slow learners (8 GB, about 20 minutes)
	$(BIN)/python -m pytest -m heavy tests/models/test_full_size.py tests/hub/test_timm.py tests/training/test_distributed.py tests/dense

compile-all: $(INSTALLED) ## torch.compile and export of every model, outputs and gradients (g++, about two hours)
	$(BIN)/python -m pytest -n 2 -m heavy tests/deploy tests/evals/cost/test_compile_time.py

bench: $(INSTALLED) ## every family beside timm or its plain reference, into docs/performance.md (2 quiet cores, 5 minutes)
	$(BIN)/python benchmarks/peers.py

bench-full: $(INSTALLED) ## the same with optimized and compiled forms, compile times, memory, and single families (g++, an hour)
	$(BIN)/python benchmarks/peers.py --full
	$(BIN)/python benchmarks/vision_lstm.py
	$(BIN)/python benchmarks/hyena.py

costs: $(INSTALLED) ## measure the forms of the long convolution anew, which decides between them (2 quiet cores)
	$(BIN)/python benchmarks/longconv.py --write

reproduce: $(INSTALLED) ## the counted tables of the docs, after a change of models or recipes
	$(BIN)/python -m tools.reproduce > reproduce.new
	mv reproduce.new docs/reproduce.md
	$(BIN)/python -m tools.counted docs/choosing.md docs/scale.md

counts: $(INSTALLED) ## count every model's parameters and MACs anew, after a change of the model rows
	$(BIN)/python -m mixlab.evals.cost.summary > counts.new
	mv counts.new mixlab/configs/counts.json

clean: ## remove the environment and caches
	rm -rf .venv build mixlab/engine/kernels/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
