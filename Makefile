# kvferry: set-up, demo, tests and checks. Run `make` for the list of targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := build/typed/kvferry
LINK_TREE = rm -rf build/typed && mkdir -p $(TYPED) && \
	for package in $(PACKAGES); do ln -s ../../../$$package $(TYPED)/$$package; done
PACKAGES := core cache models kernels proto engine kv_transfer prefill_worker decode_worker \
	router cluster client cli bench
# On a terminal pip shows its own progress bars; in a log it stays quiet.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $$(test -t 1 || echo -q) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test check format lint types fast gpu soak proto docs clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMP) ## Create .venv and install kvferry with everything that its tests need

# torch first and by itself: pip then picks the build that suits the machine before anything else asks for one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "kvferry needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "[1/3] creating $(VENV)"; $(PYTHON) -m venv $(VENV) || { \
		echo "The venv module is missing. On Debian and Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }; }
	@echo "[2/3] installing torch"
	@$(PIP_INSTALL) torch==2.13.0
	@echo "[3/3] installing kvferry and its dependencies"
	@PYTHONWARNINGS=ignore $(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Serve the embedded model, answer one prompt, show where the time went, stop
	@$(BIN)/kvferry demo

test: $(STAMP) ## All tests
	$(BIN)/pytest

check: format lint types fast ## Format, lint, types and the fast tests, under a minute

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

# mypy cannot see through an editable install that maps folders to other names; a tree of links can be seen by all.
types: $(STAMP)
	@$(LINK_TREE)
	MYPYPATH=build/typed $(BIN)/mypy -p kvferry

fast: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile -m 'not cluster and not model and not gpu and not slow'

# Random schedules of the hand-off between workers on a virtual clock: docs/faults.md.
SECONDS ?= 600
soak: $(STAMP) ## Play random schedules of the KV hand-off for SECONDS, or SCHEDULE_SEED alone
	PYTHONSAFEPATH=1 PYTHONPATH=tests/support $(BIN)/python -m kv_sim.soak \
		$(if $(SCHEDULE_SEED),--schedule-seed $(SCHEDULE_SEED),--seconds $(SECONDS))

proto: $(STAMP) ## Regenerate the stubs in proto/
	$(BIN)/python proto/generate.py

# Nothing is installed: a bare GPU host has its own torch and Triton (docs/kernels.md says what else it needs).
gpu: ## Prove on a GPU what nothing else can, in at most 8 minutes; writes build/gpu.json
	@$(LINK_TREE)
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/typed $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) \
		-m kvferry.cli.main bench gpu --json build/gpu.json

docs: $(STAMP) ## Regenerate docs/configuration.md and the tables of benchmarks.md, transfer.md and kernels.md
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/benchmark_tables.py
	$(BIN)/python docs/kernel_tables.py

clean: ## Remove caches and build outputs; keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
