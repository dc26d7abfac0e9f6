# make run: the main job on two ranks.   make test: lint, types, layers, tests (make check: tests alone).   All make .venv first, if need be.
PYTHON ?= python3
BIN := .venv/bin

# Tests that mostly wait for programs to start: two halves of the suite, of about the same length.
STARTING := tests/launcher tests/nodes tests/old_scripts tests/watch tests/doctor tests/compat tests/slurm

.PHONY: run test check check-starting check-rest soak slurm torch env lint clean

run: env
	$(BIN)/lockstep run -n 2 examples/digits.py

# Side by side: most tests wait for processes, and leave the cores to others meanwhile.
test: env
	@$(MAKE) --no-print-directory -j3 lint check-starting check-rest

check: env
	@$(MAKE) --no-print-directory -j2 check-starting check-rest

check-starting: env
	$(BIN)/pytest -q -p no:cacheprovider $(STARTING)

check-rest: env
	$(BIN)/pytest -q $(STARTING:%=--ignore=%)

# What takes too long for every change: hundreds of killed and stopped ranks, clean ends, random calls, very large tensors, killed runs.
soak: env
	SOAK=1 $(BIN)/pytest -q --timeout=1200 tests/shm
	LOCKSTEP_SOAK=100 $(BIN)/pytest -q --timeout=1200 tests/launcher/test_soak.py
	LOCKSTEP_SOAK=50 $(BIN)/pytest -q --timeout=3600 tests/train/checkpoint/test_restarts.py
	LOCKSTEP_SOAK=1 $(BIN)/pytest -q --timeout=1200 tests/nodes tests/watch/test_nodes.py tests/doctor/test_nodes.py

# Slurm's own daemons on this machine, as root: apt-get install slurmctld slurmd slurm-client munge
slurm: env
	LOCKSTEP_SLURM=1 $(BIN)/pytest -q tests/slurm

# Every test on another torch, in an environment of its own: make torch VERSION=2.9.1
torch: OTHER = .venv-$(or $(VERSION),$(error write make torch VERSION=2.9.1))
torch:
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(VERSION)/' requirements.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check -r $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	$(OTHER)/bin/pytest -q

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

env: .venv/ready

# One step, marked done at its end: an interrupted install starts again.
.venv/ready: requirements.txt pyproject.toml $(wildcard src/lockstep/shm/*.[ch]) src/lockstep/train/checkpoint/sums.c
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch .venv/ready

clean:
	rm -rf .venv .venv-* build src/*.egg-info
