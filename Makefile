# Every target sets up what it needs: a clone, Python ≥ 3.11 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSER := $(VENV)/.browser
WORKERS ?= 2
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup -rs
DENSE := out/demo-dense

.DEFAULT_GOAL := help
.PHONY: help demo demo-dense demo-web web-runtime docs test test-all lint format bench bench-gpu pictures clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "inline-attention needs Python >= 3.11, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# The tests of the report drive a Chromium: the system's, Debian's package (as root), or none, and then they are skipped.
$(BROWSER): $(READY)
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
			&& { apt-get install -y -qq chromium >/dev/null 2>&1 \
				|| { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1; }; } \
		|| echo 'No Chromium, and none can be installed here: the browser tests are skipped. As root: apt-get install chromium'
	@touch $@

demo: $(READY)  ## See why it works and what it costs, train it and its twins (3 minutes): out/demo
	$(BIN)/inline demo --output out/demo

demo-dense: $(READY)  ## Train a detector and a segmenter on generated scenes (5 minutes): out/demo-dense
	rm -rf $(DENSE)
	$(BIN)/inline data scenes --output $(DENSE)/scenes --images 600 --validation-images 60 --size 128
	$(BIN)/inline train scenes_segmentation --data-dir $(DENSE)/scenes --output $(DENSE) --experiment segmentation
	$(BIN)/inline train scenes_detection --data-dir $(DENSE)/scenes --output $(DENSE) --experiment detection \
		--initial-checkpoint $(DENSE)/segmentation/checkpoints/last/model.safetensors
	for task in detection segmentation; do \
		$(BIN)/inline predict $(DENSE)/scenes/images/validation/00000[0-7].jpg --save $(DENSE)/$${task}_pictures \
			--checkpoint $(DENSE)/$$task/checkpoints/last/model.safetensors --least-score 0.5 || exit 1; \
	done

# The model that comes with the package; without one, a small model of handwritten digits, trained first.
demo-web: $(READY)  ## Write a page that runs a model in the browser (2 minutes): out/demo-web
	@name=$$($(BIN)/python -c 'from inline_attention.models.registry import shipped_models; print(next(iter(shipped_models()), ""))'); \
	if [ -z "$$name" ]; then \
		name=out/demo-web-model/digits; rm -rf $$name; \
		$(BIN)/inline train digits --output out/demo-web-model --experiment digits || exit 1; \
	fi; \
	$(BIN)/inline export $$name --format web --output out/demo-web --force

web-runtime: $(READY)  ## Update onnxruntime-web in the package (needs npm): make web-runtime VERSION=1.30.0
	$(BIN)/python benchmarks/web_runtime.py $(VERSION)

test: $(READY) $(BROWSER)  ## Lint, type check, and all tests that need no GPU and little time
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST)

test-all: $(READY) $(BROWSER)  ## All tests this machine can run (GPU tests where there is one)
	$(PYTEST) -m 'slow or not slow'

docs: $(READY)  ## Build the documentation as a site that needs no network: out/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'Documentation written to out/site/index.html: open it in a browser'

lint: $(READY)  ## Lint and type check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)  ## Fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## Measure attention, memory and models on this CPU; results in benchmarks/results
	$(BIN)/python benchmarks/cpu_attention.py
	$(BIN)/python benchmarks/cpu_memory.py
	$(BIN)/python benchmarks/cpu_models.py

bench-gpu: $(READY)  ## Measure attention and models on this GPU; results in benchmarks/results
	$(BIN)/python benchmarks/gpu_attention.py
	$(BIN)/python benchmarks/gpu_models.py

pictures: $(READY)  ## Redraw the committed pictures from the committed results
	$(BIN)/python benchmarks/pictures.py

clean:  ## Remove the environment and everything generated
	rm -rf $(VENV) out build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
