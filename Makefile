# Two commands for a newcomer: `make demo` and `make test`. Both set up first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
SLIDE ?=
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# what they depend on is several GB of CUDA packages, not needed on a CPU; openfold3 is for tests only
NO_DEPS := cucim-cu12 lazy-loader triton openfold3

.PHONY: demo test setup lint types bench-smoke gpu-proof clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch -e ".[all,dev]"
	$(PIP) --no-deps $(NO_DEPS)
	touch $@

demo: setup
	$(BIN)/python -m thinsection demo --out demo $(if $(SLIDE),--slide "$(SLIDE)",)

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: setup
	$(BIN)/mypy

bench-smoke: setup
	$(BIN)/python -m benchmarks.smoke

# on a machine with a CUDA device: checks every GPU path against the CPU, then times it; < 8 minutes
gpu-proof: setup
	$(BIN)/python -m benchmarks.gpu_proof

# one thread per operation: tests that share the machine with other work do not wait for each other
test: export OMP_NUM_THREADS ?= 1
test: lint types
	$(BIN)/python -m pytest
	$(MAKE) --no-print-directory bench-smoke

clean:
	rm -rf $(VENV) demo
