# Everything runs in .venv, which is made once and again only when the lock file or pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2

.PHONY: setup demo test test-all lint format bench results site screenshots dist lock audit mutants clean

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "selfcon needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY)
	$(BIN)/selfcon fit --out runs/demo
	@echo 'Try next: selfcon data check YOUR-FOLDER, then selfcon fit --data YOUR-FOLDER --image-size 64'
	@echo '(selfcon is in $(BIN); selfcon fit --help tells more)'

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

results: $(READY)
	$(BIN)/python results/make.py

site: $(READY)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python docs/make.py
	@echo 'python3 -m http.server --directory build/site shows it'

screenshots: $(READY) site
	$(BIN)/python docs/screenshots.py

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python tests/check_dist.py dist

bench: $(READY)
	@for script in benchmarks/augmentation.py benchmarks/dense_loss.py; do $(BIN)/python $$script || exit 1; done

lock: $(READY)
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --all-extras \
		--python-version 3.11 pyproject.toml --output-file requirements.lock

audit: $(READY)
	$(BIN)/pip-audit --disable-pip --requirement requirements.lock

mutants: $(READY)
	WORKERS=$(WORKERS) $(BIN)/python benchmarks/mutants.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
