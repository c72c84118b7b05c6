# On a fresh machine, `make demo` and `make test` set up everything: all they need is python3 (3.11 or later)
# with venv and pip. They always use .venv, whatever environment is active.

PYTHON ?= python3
# More workers than two cores: some of them wait for commands and servers.
PYTEST_ARGS ?= -n 3 --dist worksteal
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-ceph lint types docs unit fuzz soak bench clean

demo: $(STAMP)
	rm -rf .demo
	$(BIN)/python examples/demo/demo.py .demo

test: lint types docs unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy examples/demo/*.py
	$(BIN)/mypy docs/site/pages.py

# The site, in .site: a link or a name that leads nowhere is an error. Nothing is fetched.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

# WEIGHTVC_CHAIN, if set, names a directory with real checkpoints, which are tested with as well.
unit: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Stores, repositories, commands and a crowd of processes on Ceph instead of SeaweedFS; CEPH_TESTS=tests for whatever
# uses a real S3 server. Its packages are fetched once, into .ceph.
CEPH_TESTS ?= tests/stores tests/repository tests/cli tests/test_soak.py::test_a_crowd_loses_nothing
test-ceph: $(STAMP)
	$(BIN)/python -m tests.kit.ceph
	$(BIN)/python -m pytest --s3 ceph $(PYTEST_ARGS) $(CEPH_TESTS)

# FUZZ_ARGS="--seconds 600 stream" for one target and longer; .fuzz has logs, corpora and what was found.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz.run $(FUZZ_ARGS)

# Long runs that look for something that is lost: by orders of events in a model, and by real processes. So many
# seconds each; SOAK_ARGS="local --seed 7" for one of them.
SECONDS ?= 600
soak: $(STAMP)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(SOAK_ARGS)

bench:
	@echo "benchmarks, each with --help; run one with $(BIN)/python:"
	@ls benchmarks/*.py

# One pip command, so that its resolver sees every pin at once.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .ceph .demo .fuzz .site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
