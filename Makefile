# Everything runs in .venv. It is created once, and updated when the lock file or pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INTEGRATIONS := .venv/.ready-integrations
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
COMPILE_LOCK = $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --python-version 3.11

.PHONY: setup demo quick test test-slow lint format bench results site screenshots dist lock audit mutants clean

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) scripts/setup_env.py

$(INTEGRATIONS): $(READY) requirements-integrations.lock
	@$(BIN)/python scripts/setup_env.py --lock requirements-integrations.lock --ready $(@F)

demo: $(READY)
	$(BIN)/selfcon fit --out runs/demo
	@echo 'Next: open runs/demo/report.html in a browser, or train on your own photos:'
	@echo '  $(BIN)/selfcon data check PHOTOS'
	@echo '  $(BIN)/selfcon fit --data PHOTOS --image-size 64 --batch-size 64 --stream true --method selfcon-1stage'

quick: $(READY)
	$(PYTEST) -m "not slow and not medium"

test: $(READY)
	$(PYTEST) -m "not slow"

test-slow: $(READY) $(INTEGRATIONS)
	$(PYTEST) -m slow

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
	$(COMPILE_LOCK) --extra log --extra export --extra serve --extra transfer --group dev \
		pyproject.toml --output-file requirements.lock
	$(COMPILE_LOCK) --group pyproject.toml:integrations --constraint requirements.lock \
		--output-file requirements-integrations.lock

audit: $(READY) $(INTEGRATIONS)
	$(BIN)/pip-audit --disable-pip --requirement requirements.lock

mutants: $(READY)
	WORKERS=$(WORKERS) $(BIN)/python benchmarks/mutants.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
