# The day's commands, by one word: `make`, or `make help`, lists them. CONTRIBUTING.md says more.
PYTHON = .venv/bin/python

help:            ## this list
	@sed -n 's/^\([a-z]*\): .*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:           ## make .venv, as the machine's device needs it
	bash run_scripts/setup.sh

quick:           ## the quick tests: about a minute
	bash run_scripts/test.sh -m quick

test:            ## every law, in 10 to 20 minutes on two cores
	bash run_scripts/test.sh

all:             ## all tests, nothing skipped, on Python 3.10 to 3.13
	bash run_scripts/test.sh --all

lint:            ## ruff: mistakes and format
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .

types:           ## mypy
	$(PYTHON) -m mypy

benchmarks:      ## what the data path costs, beside others
	$(PYTHON) benchmarks/loader.py

docs:            ## the documentation as a site, in build/site
	$(PYTHON) -m mkdocs build --strict

.PHONY: help setup quick test all lint types benchmarks docs
