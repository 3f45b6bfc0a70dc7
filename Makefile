# `make` lists the targets. Whatever needs .venv builds it first, when it is missing or outdated.

BIN := .venv/bin

# `make venv CUDA=1` installs torch for NVIDIA GPUs, and later calls keep it; `make venv CUDA=0`
# goes back.
CUDA ?= $(if $(wildcard .venv/installed-cuda),1,0)
VARIANT := $(if $(filter 1,$(CUDA)),-cuda)
INSTALLED := .venv/installed$(VARIANT)
CONSTRAINTS := constraints$(VARIANT).txt

BENCHMARKS := $(addprefix benchmarks/, $(addsuffix .py, \
	cartpole cluster memory pong recorder replay serve shm startup utilization wire))

EXTRAS ?= atari,box2d,browser,dev,docs,minatar,mujoco,onnx,pettingzoo,ray,tune,video,vizdoom

WEB := examples/web_game/node_modules/.package-lock.json

# The first Python that runs and is new enough; or say `make train PYTHON=/path/to/python3`.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

CLI_DOCS = TERM=dumb $(BIN)/python -m typer penstock.cli.app utils docs --name penstock --title Commands

SOURCES := actors algos autotune bench benchmarks cli configs core device envs evaluation examples launch league \
	learner models monitor penstock profiling replay serving tests transport watch

.DEFAULT_GOAL := help
.PHONY: help venv web train test test-all test-slow learn-check chaos fuzz check lint types imports wheel format docs reference pictures bench peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## build .venv with the pinned versions; CUDA=1: with torch for NVIDIA GPUs

# Bytecode is compiled here, all cores at once, and not left to the first import: importing torch
# without it takes twice as long, and PYTHONDONTWRITEBYTECODE may be set.
$(INSTALLED): pyproject.toml $(sort constraints.txt $(CONSTRAINTS))
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer was found: install one," \
		"or name it with make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "building .venv with $(PYTHON); the first time takes some minutes"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) setuptools
	$(BIN)/pip install --quiet --no-compile --no-build-isolation -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # libraries ship files that cannot compile
	touch $@

web: $(WEB) ## install the npm packages of the web game, for its page and its tests; needs Node 20

$(WEB): examples/web_game/package-lock.json
	cd examples/web_game && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

train: venv ## train CartPole with two actors and one learner
	@$(BIN)/python -m compileall -q penstock penstock/*/
	$(BIN)/penstock train cartpole

# Most tests that start whole runs are left to `make test-all`: they wait for processes most of the time.
test: venv ## run the tests of the parts and some of whole runs, some minutes on two cores
	$(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal -m "not slow and not gpu and (smoke or not system)"

test-all: test ## run `make test`, then the tests of whole runs, faults and recovery
	@! command -v npm >/dev/null || $(MAKE) --no-print-directory web \
		|| echo "no npm packages: the tests of JavaScript in Node and in pages are skipped" >&2
	$(BIN)/pytest -n 2 --dist loadfile -m "system and not smoke and not slow and not gpu"

test-slow: venv ## run the tests that `make test-all` leaves out: long ones and variants
	$(BIN)/pytest -m "slow or gpu"

# Of `make chaos` and `make fuzz`: another seed every time, which a failure prints. Chaos has bounds
# on time three times as wide, as for a machine that does much else.
SEED ?= $(shell date +%s)
MINUTES ?= 2.5
EXAMPLES ?= 60
SESSION ?= 6
SLACK ?= 3

learn-check: venv ## train five seeds of six presets, compare their returns with bands, 20 minutes
	$(BIN)/python benchmarks/learn_check.py

chaos: venv ## inject faults into runs of every topology: make chaos MINUTES=60 SEED=1
	$(BIN)/python benchmarks/chaos.py --seed $(SEED) --minutes $(MINUTES) --session $(SESSION) --slack $(SLACK)

fuzz: venv ## give hostile bytes to all that reads bytes from elsewhere: make fuzz SEED=1
	PENSTOCK_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -q --hypothesis-seed $(SEED) tests/fuzz

check: lint types imports ## check style, types and the import rule

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports --no-logo

wheel: venv ## build a wheel, install it elsewhere, import all of it
	$(BIN)/pytest -q tests/system/test_wheel.py

format: venv ## format the code, mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv ## build the site of the documentation into site/, without a network
	$(BIN)/python -m penstock.configs.reference --check docs/configuration.md
	@$(CLI_DOCS) | sed '$$d' | diff - docs/cli.md || { echo "docs/cli.md is not what the commands say; run: make reference" >&2; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

reference: venv ## write the pages that come from the code: the configuration, the commands
	$(BIN)/python -m penstock.configs.reference > docs/configuration.md
	$(CLI_DOCS) | sed '$$d' > docs/cli.md

pictures: venv ## make the pictures of the docs from real runs and results, ten minutes; needs Chromium
	$(BIN)/python benchmarks/chart.py
	$(BIN)/python benchmarks/pictures.py

bench: venv ## run the benchmarks, one after another; results go to benchmarks/results
	set -e; for benchmark in $(BENCHMARKS); do echo "$$benchmark"; $(BIN)/python $$benchmark --save; done

peers: ## install what `penstock bench --peers` and `benchmarks/replay.py --peers` compare with
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -r benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-sf
	.venv-sf/bin/pip install --quiet -r benchmarks/peers/requirements-sf.txt

clean: ## remove .venv, caches and builds; runs/ stays
	rm -rf .venv .venv-peers .venv-sf build dist site penstock.egg-info .hypothesis \
		.mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
