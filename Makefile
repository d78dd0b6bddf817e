# Every target but help makes the environment if it is missing. PYTHON chooses the interpreter, and DEVICE what JAX is
# installed for: cpu, cuda, cuda12 or tpu. DEMO has flags of the demo and RUNS its folder: a demo of another number of
# steps needs a new folder.
PYTHON ?= python3
VENV := .venv
# Once chosen, the device stays.
DEVICE ?= $(or $(patsubst ready-%,%,$(notdir $(firstword $(wildcard $(VENV)/ready-*)))),cpu)
BIN := $(VENV)/bin
RUNS ?= runs/demo
DEMO ?=
# Most of the tests' time is compilation, which keeps one core busy: so one process a core.
PARALLEL := -n auto --dist loadgroup
# COSTS=FILE writes what each test costs; tests/costs.py makes a table of it.
COSTS ?=
# The folder of `make smol`, the text that it scores, and the port of its service.
SMOL ?= runs/smol
SMOL_TEXT ?= docs/families/*.md
PORT ?= 8000
# Fewer page faults for the large buffers of a step on a CPU.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

define CHECK_PYTHON
"import sys; v = '%d.%d' % sys.version_info[:2]; sys.exit(None if v in ('3.11', '3.12', '3.13') else \
'error: $(PYTHON) is Python ' + v + ', and 3.11 to 3.13 is needed: name one, as in make setup PYTHON=python3.12')"
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo smol test test-all lint format generated docs peers

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/ready-$(DEVICE) ## make the environment .venv; PYTHON=python3.12 and DEVICE=cuda (cuda12, tpu) choose

# --clear: of an environment that was begun with another Python nothing may stay.
$(VENV)/ready-$(DEVICE): requirements.txt pyproject.toml
	$(if $(filter $(DEVICE),cpu cuda cuda12 tpu),,$(error DEVICE=$(DEVICE) must be cpu, cuda, cuda12 or tpu))
	@$(PYTHON) -c $(CHECK_PYTHON)
	$(PYTHON) -m venv $$([ "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" ] || echo --clear) $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt -e ".[$(DEVICE)]"
	rm -f $(VENV)/ready-*
	touch $@

demo: setup ## train three small models on Python's own sources, and show where each of them is ahead
	$(BIN)/flash-lm demo --workdir=$(RUNS) $(DEMO)

smol: $(SMOL)/smollm2 ## fetch SmolLM2-135M-Instruct (93 MB), import it, score it, ask it a question, and serve it
	$(BIN)/python -m flash_lm.evaluate --workdir=$(SMOL)/smollm2 --split=whole --lengths=512 \
		--config.data.corpus=text --config.data.path='$(SMOL_TEXT)'
	$(BIN)/python -m flash_lm.generate --workdir=$(SMOL)/smollm2 --chat --temperature=0 \
		--prompt="What is the capital of France?"
	$(BIN)/python -m flash_lm.serve --workdir=$(SMOL)/smollm2 --port=$(PORT)

$(SMOL)/smollm2: | setup
	$(BIN)/python scripts/fetch_smollm2.py --out=$(SMOL)/download
	$(BIN)/python -m flash_lm.import_model --model=$(SMOL)/download --out=$(SMOL)/smollm2

test: setup ## run the tests, without the slow ones
	$(BIN)/python -m pytest $(PARALLEL) $(COSTS:%=--costs=%) -m "not slow"

test-all: setup ## run all tests
	$(BIN)/python -m pytest $(PARALLEL) $(COSTS:%=--costs=%)

lint: setup ## check style, types, and which rooms import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

format: setup ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: setup ## write what is made from the code again: keys, families, notebooks' shared cells
	$(BIN)/python docs/tools/write_keys.py
	$(BIN)/python docs/tools/write_families.py
	$(BIN)/python docs/tools/draw_families.py
	$(BIN)/python docs/tools/write_notebooks.py

# If a peer does not install, this prints its name and goes on with the next one.
peers: setup ## make .venv-peers, with what benchmarks/peers and studies/quality/train_peers.py compare ours with
	$(PYTHON) -m venv .venv-peers
	grep -v '^#' requirements-peers.txt | while read -r package; do \
		.venv-peers/bin/pip install --quiet --no-build-isolation "$$package" || echo "not installed: $$package"; \
	done
	$(BIN)/python -m benchmarks.peers.fetch

docs: setup ## build the site into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
