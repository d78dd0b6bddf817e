# Every target makes the environment if it is missing. PYTHON chooses the interpreter; DEMO_STEPS the length of the demo,
# and RUNS its folder, which a demo of another length needs anew.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS ?= runs/demo
DEMO_STEPS ?= 240
# Compiling, which takes most of the time of the tests, keeps one core busy at a time.
PARALLEL := -n auto --dist loadgroup
DEMO_FAMILIES := transformer_plus_plus flash_quad flash
# Fewer page faults for the large buffers of a step on a CPU.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: setup demo test test-all lint docs peers

setup: $(VENV)/ready

$(VENV)/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

demo: setup
	set -e; for family in $(DEMO_FAMILIES); do \
		$(BIN)/python -m flash_lm.train --config=configs/quickstart.py --workdir=$(RUNS)/$$family \
			--config.model.family=$$family --config.train.steps=$(DEMO_STEPS); \
		$(BIN)/python -m flash_lm.evaluate --workdir=$(RUNS)/$$family --split=test; \
	done
	$(BIN)/python scripts/compare.py $(addprefix $(RUNS)/,$(DEMO_FAMILIES)) --out=$(RUNS)
	$(BIN)/python -m flash_lm.generate --workdir=$(RUNS)/flash --prompt="import " --max_tokens=60 --temperature=0.7

test: setup
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: setup
	$(BIN)/python -m pytest $(PARALLEL)

# A peer that does not install is told of, and the rest goes on.
peers: setup
	$(PYTHON) -m venv .venv-peers
	grep -v '^#' requirements-peers.txt | while read -r package; do \
		.venv-peers/bin/pip install --quiet --no-build-isolation "$$package" || echo "not installed: $$package"; \
	done

# The site, into docs/_build/html; a warning is an error.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
