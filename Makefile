# Two commands do all the set-up: `make serve` and `make test`.
SHELL := /bin/bash
# The first that runs: pyenv has a command for each version that is not switched on too.
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do $$p -c "" 2>/dev/null && command -v $$p && break; done)
BIN := .venv/bin
# Modules that are imported are compiled then, and kept so: the rest of a package is never read.
BYTECODE := PYTHONDONTWRITEBYTECODE=
PIP_FLAGS := --disable-pip-version-check --quiet
PIP := $(BYTECODE) $(BIN)/python -m pip $(PIP_FLAGS)
MODEL ?= assets/tiny-moe
# One of each domain; `make serve ESFT=` serves none, and other names of $(MODEL)/esft may stand here.
ESFT ?= token-intent gate-law token-summary gate-translation
ESFT_FOLDERS = $(foreach name,$(ESFT),$(addprefix $(name)=,$(wildcard $(MODEL)/esft/$(name))))
# Adapters with a task head: each answers to NAME-head. `make serve HEADS=` serves none.
HEADS ?= $(notdir $(wildcard $(MODEL)/heads/*))
HEAD_FOLDERS = $(foreach name,$(HEADS),$(name)-head=$(MODEL)/heads/$(name))
PORT ?= 8000
ARGS ?=
# `make lock UPGRADE=--upgrade` takes the newest versions that pyproject.toml allows.
UPGRADE ?=

# The suite starts some sixty processes: they share what one of them has compiled to bytecode.
TEST_ENV := $(BYTECODE)

# XLA compiles most of the suite's time. Empty: as in a user's process.
FAST_COMPILE ?= 1

# A worker takes whole files, and imports them then: their fixtures are made once.
BY_FILE := --dist loadfile --no-loadscope-reorder -o console_output_style=classic

# jax as pyproject.toml pins it: the plugins that compile for other devices must be of the same one.
JAX_VERSION := $(shell sed -n 's/.*"jax==\([0-9.]*\)".*/\1/p' pyproject.toml)
# The compiler for TPUs that goes with it.
LIBTPU_VERSION := 0.0.48.1

# triton-ascend has wheels for Python 3.9 to 3.11 only.
ASCEND_PYTHON ?= python3.11

# Tools that write the lock files and the list of parts.
TOOLS := .cache/supply-chain
LOCK = $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.12 --generate-hashes $(UPGRADE) \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
# The lock files name each file by its hash. Elsewhere there may be no file for a version.
LOCKED_FOR := import platform as p, sys; sys.exit((p.system(), p.machine()) not in (("Linux", "x86_64"), ("Linux", "aarch64")) or sys.version_info[:2] not in ((3, 12), (3, 13)))

INSTALL_LOCKED := install --no-compile --require-hashes --no-deps
INSTALL_BUILD := $(INSTALL_LOCKED) --requirement requirements/build.txt

# The C++ kernels are compiled beside the installation of what they do not need. A server that
# starts before they are there waits for them; if this fails, it compiles them itself.
KERNELS := $(BYTECODE) PYTHONPATH=src nice -n 5 $(BIN)/python -m lora_jax.ops.cpu.build

define install  # of requirements/$(1).txt, or else of the ranges in pyproject.toml with extras $(2)
	@if $(BIN)/python -c '$(LOCKED_FOR)'; then \
		echo 'Installing the packages of requirements/$(1).txt into .venv.' && \
		{ test .venv/.build -nt requirements/build.txt || { $(PIP) $(INSTALL_BUILD) && touch .venv/.build; }; } && \
		$(PIP) $(INSTALL_LOCKED) --requirement requirements/kernels.txt && \
		{ $(KERNELS) & } && \
		$(PIP) $(INSTALL_LOCKED) --no-build-isolation --requirement requirements/$(1).txt && \
		$(PIP) install --no-compile --no-deps --no-build-isolation --editable .; \
	else \
		echo 'requirements/$(1).txt is for Linux (x86_64, aarch64) and Python 3.12 or 3.13: installing by the ranges of pyproject.toml, without hashes.' && \
		$(PIP) install --editable '.$(2)'; \
	fi
endef

# With the pip of $(PYTHON), which is compiled already; ensurepip's takes 9 s of a processor.
define install_pip
	if $(PYTHON) -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -m pip --python $(BIN)/python $(PIP_FLAGS) $(INSTALL_BUILD) && touch .venv/.build; \
	else \
		$(BIN)/python -m ensurepip >/dev/null; \
	fi
endef

.PHONY: serve wheel test test-quick test-all test-avx2 test-faults soak test-clients test-gpu test-aot test-ascend lint lock sbom docs bench-cpu bench-gpu bench-report notebooks clean

serve: .venv/.serve  ## start the embedded default on this machine's CPU
	$(BYTECODE) $(BIN)/python -m serving.launch $(MODEL) $(addprefix --lora-dir ,$(wildcard $(MODEL)/adapters)) $(if $(strip $(ESFT_FOLDERS)$(HEAD_FOLDERS)),--lora-modules $(ESFT_FOLDERS) $(HEAD_FOLDERS)) --port $(PORT) $(ARGS)

wheel: .venv/.serve  ## a wheel with the C++ kernels for every level of this architecture, in dist/
	LORA_JAX_PREBUILT=1 $(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

HARDWARE := gpu or multigpu or aot or ascend

test: .venv/.dev .cache/vllm-rs  ## every promise of the CPU by one case, the first notebook too
	$(TEST_ENV) FAST_COMPILE=$(FAST_COMPILE) $(BIN)/python -m pytest -n 3 $(BY_FILE) --nbmake -m "not ($(HARDWARE) or slow or long)" notebooks tests

test-quick: .venv/.dev  ## the unit tests, for the loop at the desk
	$(TEST_ENV) FAST_COMPILE=$(FAST_COMPILE) $(BIN)/python -m pytest -n 3 $(BY_FILE) -m "not ($(HARDWARE) or slow or long)" tests/unit

test-all: .venv/.dev .cache/vllm-rs  ## every case of every test that needs no accelerator
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 $(BY_FILE) --nbmake -m "not ($(HARDWARE) or slow)" notebooks tests
	$(BIN)/python -m pytest -n 0 -m "slow and not ($(HARDWARE))" tests

# XLA orders the sums of a product by the CPU's instructions; ISA=SSE4_2 MARCH=x86-64-v2 has others yet.
ISA ?= AVX2
MARCH ?= x86-64-v3

test-avx2:  ## the same suite as if the CPU had no AVX-512: programs of XLA and C++ kernels
	XLA_FLAGS="$$XLA_FLAGS --xla_cpu_max_isa=$(ISA)" LORA_JAX_MARCH=$(MARCH) $(MAKE) test FAST_COMPILE=

test-faults: .venv/.dev  ## 20 schedules of kills, stops and full disks on a real cluster
	$(BIN)/python -m pytest -n 0 tests/system/faults/test_checker.py tests/system/faults/test_schedules.py

SECONDS_OF_SOAK ?= 3600

soak: .venv/.dev  ## mixed traffic for an hour, with bars on memory, descriptors and pauses
	SOAK_SECONDS=$(SECONDS_OF_SOAK) $(BIN)/python -m pytest -n 0 -s tests/system/faults/test_soak.py

test-clients: .venv/.dev .cache/clients  ## LangChain, LiteLLM and instructor against the server
	$(BIN)/python -m pytest -n 0 tests/system/clients/test_other_clients.py

# Packages of an extra in a folder: litellm needs another openai than the other tests.
.cache/clients: requirements/clients.txt | .venv/bin/python
	@rm -rf $@ && mkdir -p .cache
	$(PIP) install --require-hashes --no-deps --only-binary :all: --target $@ --requirement $<
	@touch $@

test-gpu: .venv/.dev  ## on a machine with an NVIDIA GPU
	$(BIN)/python -m pytest -m "gpu or multigpu"

test-aot: .venv/.dev .cache/aot/.cuda .cache/aot/.tpu-$(LIBTPU_VERSION)  ## compile for GPU and TPU on any machine, and read the report
	PYTHONPATH=.cache/aot/cuda:.cache/aot/tpu $(BIN)/python -m pytest -n 2 $(BY_FILE) -m aot tests/kernels/aot tests/kernels/cuda_backend/test_ffi.py tests/kernels/cuda_backend/test_machine_code.py tests/hardware/cuda_backend/test_toolkit.py

test-ascend: .venv/.dev .cache/ascend/.wheels  ## Ascend without an NPU: wheels, triton-ascend's interpreter
	PYTHONPATH=.cache/ascend/wheels TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
		$(BIN)/python -m pytest tests/kernels/npu_backend

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tests/support/checks/lint_calls.py
	$(BIN)/lint-imports

docs: .venv/.docs  ## build the pages as a site in .cache/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python docs/site/check.py .cache/site

bench-cpu: .venv/.dev  ## this server against transformers + PEFT, in one run
	$(BIN)/python -m bench.serve --cpu --out bench/results

# Where a part's results go, and the seconds that all parts may take.
OUT ?= .cache/bench-gpu
BUDGET_S ?= 7200

bench-gpu: .venv/.dev  ## every benchmark that needs NVIDIA GPUs, in one run with a time limit
	$(BIN)/python -m bench.gpu_batch --out $(OUT) --budget-s $(BUDGET_S)

bench-report: .venv/.dev  ## draw every plot of bench/results again
	$(BIN)/python -m bench.report

notebooks: .venv/.dev
	$(BIN)/python -m pytest --nbmake notebooks

.venv/bin/python:
	@test -n '$(PYTHON)' || { echo 'No python3.12, python3.13 or python3 runs: make PYTHON=/path/to/python3.12'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 12) or sys.exit("Python 3.12 or newer is needed, not %d.%d: make PYTHON=/path/to/python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv --without-pip .venv && { $(install_pip); } || { rm -rf .venv; exit 1; }  # no half folder for the next make

.venv/.serve: pyproject.toml requirements/build.txt requirements/kernels.txt requirements/serve.txt | .venv/bin/python
	$(call install,serve)
	@touch $@

.venv/.dev: pyproject.toml requirements/build.txt requirements/kernels.txt requirements/dev.txt | .venv/bin/python
	$(call install,dev,[dev])
	@PYTHONWARNINGS=ignore $(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages have files of other Pythons
	@touch $@ .venv/.serve

.venv/.docs: .venv/.serve
	$(PIP) install --editable '.[docs]'
	@touch $@

lock: $(TOOLS)/.installed  ## pin every package that is installed, with hashes: requirements/*.txt
	$(LOCK) pyproject.toml --output-file requirements/serve.txt
	$(LOCK) pyproject.toml --extra dev --output-file requirements/dev.txt
	$(LOCK) pyproject.toml --extra otel --constraint requirements/serve.txt --output-file requirements/otel.txt
	$(LOCK) --group build --output-file requirements/build.txt
	$(LOCK) --group kernels --constraint requirements/serve.txt --output-file requirements/kernels.txt
	$(LOCK) --group supply-chain --output-file requirements/supply-chain.txt
	$(LOCK) --group clients --output-file requirements/clients.txt
	$(LOCK) --group vllm-rs --no-deps --output-file requirements/vllm-rs.txt

sbom: $(TOOLS)/.installed  ## write dist/sbom.json: what `make serve` installs, as CycloneDX
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file dist/sbom.json requirements/serve.txt

$(TOOLS)/.installed: requirements/supply-chain.txt | .venv/bin/python
	$(BIN)/python -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps --requirement $<
	@touch $@

# The load generator inside this wheel drives the server in the tests.
.cache/vllm-rs: requirements/vllm-rs.txt | .venv/bin/python
	@rm -rf .cache/wheel && mkdir -p .cache/wheel
	$(PIP) download --require-hashes --no-deps --dest .cache/wheel --requirement $<
	$(BIN)/python -m zipfile -e .cache/wheel/vllm-*.whl .cache/wheel/out
	@mv .cache/wheel/out/vllm/vllm-rs $@ && chmod +x $@ && rm -rf .cache/wheel

# The compiler for NVIDIA GPUs, without driver or libraries; ptxas only where there is no toolkit.
.cache/aot/.cuda: pyproject.toml | .venv/bin/python
	$(PIP) install --no-deps --upgrade --target .cache/aot/cuda \
		jax-cuda13-plugin==$(JAX_VERSION) jax-cuda13-pjrt==$(JAX_VERSION) \
		$$(command -v ptxas >/dev/null || test -x /usr/local/cuda/bin/ptxas \
			|| echo nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.*)
	@touch $@

.cache/aot/.tpu-$(LIBTPU_VERSION): | .venv/bin/python
	$(PIP) install --no-deps --upgrade --target .cache/aot/tpu libtpu==$(LIBTPU_VERSION)
	@touch $@

# Read, interpreted and lowered; none of it is imported in .venv, or finds a device.
.cache/ascend/.wheels: Makefile | .venv/bin/python
	$(PIP) install --no-deps --upgrade --target .cache/ascend/wheels torch-npu==2.14.0 vllm-ascend==0.23.0
	$(PIP) install --no-deps --upgrade --target .cache/ascend/triton --only-binary=:all: \
		--python-version $$($(ASCEND_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
		triton-ascend==3.2.0 pybind11==3.0.* numpy==2.2.*
	ln -sf $$($(ASCEND_PYTHON) -c 'import sys; print(sys.executable)') .cache/ascend/python
	@touch $@

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis
