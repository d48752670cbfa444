# Every target works on a fresh machine with Python 3.11 or newer, make and a package index.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: help setup demo test bench clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.runtime  ## make a virtual environment with what running needs

$(VENV)/.runtime: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.development: requirements-dev.txt $(VENV)/.runtime
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

demo: setup  ## train the embedded default (about three minutes on two cores), then sample from it
	$(RUN) train.py config/quick.toml --out_dir=runs/quick $$(test -f runs/quick/last.pt && echo --resume)
	$(RUN) sample.py --out_dir=runs/quick --prompt="def " --max_new_tokens=400

test: $(VENV)/.development  ## check style and types, and run every test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest

bench: $(VENV)/.development  ## measure here, beside the peers, into bench/results/ (half an hour)
	$(RUN) -m bench.peers
	$(RUN) -m bench.commands
	$(RUN) compare.py --out_dir=bench/results
	$(RUN) -m bench.generation
	$(RUN) -m bench.scaling

clean:  ## remove the environment and caches, never runs or data
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
