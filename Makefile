# `make demo` and `make test` are the two main commands; both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
UV := $(VENV)/bin/uv
RUN := $(VENV)/bin
UV_VERSION := 0.13.8
DATA ?= ../shared/data

.PHONY: dist install install-dev compiled demo unit test test-all slow check format lock openapi settings newest-sglang emulated colocate chaos conformance screenshots gpu clean

install: $(VENV)/.installed $(VENV)/.compiled
install-dev: $(VENV)/.installed-dev $(VENV)/.compiled
compiled: $(VENV)/.compiled-simulator

$(UV):
	@./.ci/bootstrap-uv "$(PYTHON)" "$(VENV)" "$(UV_VERSION)"

$(VENV)/.installed: $(UV) requirements/engine.txt requirements/demo.txt pyproject.toml client/pyproject.toml
	@echo "== 1 of 3: downloads about 9 GB, which takes longest, and installs it into $(VENV)"
	VIRTUAL_ENV=$(VENV) $(UV) pip install --compile-bytecode --require-hashes -r requirements/engine.txt
	VIRTUAL_ENV=$(VENV) $(UV) pip install --no-deps --require-hashes -r requirements/demo.txt
	VIRTUAL_ENV=$(VENV) $(UV) pip install --no-deps -e client -e .
	$(RUN)/python -m compileall -q client service engine_ext migrations
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	VIRTUAL_ENV=$(VENV) $(UV) pip install --compile-bytecode --require-hashes -r requirements/dev.txt
	@touch $@

LOOPS := $(wildcard engine_ext/*.py engine_ext/*/*.py)
$(VENV)/.compiled: $(VENV)/.installed $(LOOPS)
	@echo "== 2 of 3: compiles the planner and the scan to machine code: one or two minutes, once"
	$(RUN)/python -m engine_ext.warm_up
	@touch $@

# For tests: one process compiles what several would compile at once
$(VENV)/.compiled-simulator: $(VENV)/.compiled
	$(RUN)/python -m benchmarks.simulate.warm_up
	@touch $@

# Wheels and sdists of the client and the service. The service's wants an environment of its own:
# pip install dist/batchweave-….whl 'dist/batchweave_server-….whl[engine]'
dist: $(UV)
	rm -rf dist
	$(UV) build --python $(RUN)/python -o dist client
	$(UV) build --python $(RUN)/python -o dist .

demo: install
	@echo "== 3 of 3: starts the service and SGLang, 15 to 30 s on a CPU, and runs the requests"
	$(RUN)/batchweave demo $(if $(FILE),--file "$(FILE)") $(if $(KEEP),--keep) $(if $(ONLINE),--online)

# Fast: no SGLang, no PostgreSQL, no Redis
unit: $(VENV)/.installed-dev compiled
	$(RUN)/pytest -m "not slow" tests/unit

# Three files at a time, because many tests wait more than they compute. `make -k` runs the slow ones also if one failed.
test: $(VENV)/.installed-dev compiled
	$(RUN)/pytest -n 3 -m "not slow"
# A fourth, because that which runs Ray's runs nothing else (tests/scheduling.py).
slow: $(VENV)/.installed-dev compiled
	$(RUN)/pytest -n 4 -m slow
test-all: test slow

check: $(VENV)/.installed-dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright

format: $(VENV)/.installed-dev
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# The newest SGLang that can be installed, or VERSION=…, with the engine's tests; in a folder of its own
newest-sglang: install-dev
	.ci/newest-sglang $(VERSION)

openapi: install
	$(RUN)/batchweave openapi > openapi.yaml

settings: install
	$(RUN)/python -m service.cli.settings_page > docs/settings.md

# With real lengths and prompts: make emulated DATA=folder, where folder has lengths/, text/ and tokenizers/
emulated: install-dev
	$(RUN)/python -m benchmarks.emulated $(DATA)

# Online requests beside batches, in SGLang on emulated machines: make colocate DATA=folder, as above
colocate: install-dev
	$(RUN)/python -m benchmarks.colocate_emulated $(DATA)

# Inject random faults into a running service; docs/reliability.md says what is checked. SEED=… chooses other faults
N ?= 100
SEED ?= 1
chaos: install-dev
	$(RUN)/python -m tests.faults.campaign $(N) --seed $(SEED)

# Make every call of the contract with two versions of the official client, each in its own environment
conformance: install-dev
	$(RUN)/python -m tests.conformance

# Save screenshots of every dashboard page to docs/screenshots, from a running service; needs chromium
screenshots: install-dev
	$(RUN)/python -m tests.dashboard.screenshots

# Compare with SGLang on this machine's GPU: DATA=folder, or FILE=requests.jsonl MODEL=model [PRICE=dollars an hour].
# docs/gpu.md has more, and how to do so without a network
gpu: install-dev
	$(RUN)/python -m benchmarks.gpu $(if $(FILE),--file "$(FILE)" --model "$(MODEL)" $(if $(PRICE),--price $(PRICE)),$(DATA))

# No uv.lock: it would record the hosts of one person's package registry.
LOCK := $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-package batchweave
lock: $(UV)
	$(LOCK) --extra engine pyproject.toml -o requirements/engine.txt
	$(LOCK) -c requirements/engine.txt pyproject.toml -o requirements/server.txt
	$(LOCK) --extra engine --extra fleet -c requirements/engine.txt pyproject.toml -o requirements/fleet.txt
	$(LOCK) --extra engine --extra fleet --group dev -c requirements/engine.txt pyproject.toml -o requirements/dev.txt

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
