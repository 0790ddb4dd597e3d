# make test, demo, bench, check and docs: each makes its own environment first. See CONTRIBUTING.md.
#
# TORCH is what pip installs as torch. Linux's ordinary wheel carries CUDA (gigabytes); without an
# NVIDIA GPU the CPU wheel is far smaller:
#   make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Training runs side by side in the demo, each with a learning rate of its own.
JOBS ?= 1
# More for pytest, say ARGS="-k wire", or for the demo.
ARGS ?=
# One thread: torch's threads spin, and tests beside other work then slow to a crawl.
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

.PHONY: test check sdk-matrix cookbook crash-storm demo bench docs proto clean
.DELETE_ON_ERROR:

test: $(VENV)/.for-dev
	$(PYTEST) $(ARGS)

check: $(VENV)/.for-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) tests/test_architecture.py

# Every version of the SDK that changed the wire; ARGS="0.20.0" for one.
sdk-matrix: $(VENV)/.for-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/sdk/matrix.py $(ARGS)

# A hundred deaths of a server while a loop trains.
crash-storm: $(VENV)/.for-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/crash/storm.py $(ARGS)

# Recipes of tinker-cookbook, unmodified; see tests/cookbook/README.md.
cookbook: $(VENV)/.for-dev
	$(VENV)/bin/python tests/cookbook/run.py $(ARGS)

demo: $(VENV)/.for-demo
	$(VENV)/bin/python -m recipes.demo --jobs $(JOBS) $(ARGS)

# Every benchmark, in under 20 minutes on two quiet cores; ARGS="--only fairness" for one.
bench: $(VENV)/.for-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/bench.py $(ARGS)

# Into build/site. An environment of its own, without torch.
docs: $(VENV)-docs/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $< build --strict

# By a protoc of 2024 in an environment of its own: code of a later one refuses older runtimes.
proto:
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/python -m pip install 'grpcio-tools==1.65.5' 'setuptools<81'
	build/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. openrl/api/wire.proto

clean:
	rm -rf $(VENV) $(VENV)-docs .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info

NEEDS_PYTHON = @'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
    echo 'OpenRL needs Python 3.11 or later: install one, or name it: make PYTHON=/path/to/python3'; \
    exit 1; }

# --- the environment: torch as chosen, then everything else as pinned -------------------------

$(VENV)/.for-demo: EXTRAS = server,recipes
$(VENV)/.for-dev: EXTRAS = server,recipes,dev
$(VENV)/.for-dev: SUFFICES_FOR = $(VENV)/.for-demo
$(VENV)/.for-demo $(VENV)/.for-dev: $(VENV)/.torch pyproject.toml constraints.txt
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	touch $@ $(SUFFICES_FOR)

# Without its dependencies, since a wheel index of torch's own does not have them as pinned.
$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	$(VENV)/bin/python -m pip install --no-deps $(TORCH)
	touch $@

$(VENV)/bin/python:
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv $(VENV)

$(VENV)-docs/bin/mkdocs: pyproject.toml constraints.txt
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install -c constraints.txt -e '.[docs]'
	touch $@
