# `make demo` and `make test` are all that a fresh machine needs: they make .venv, install, and run. Both can be repeated.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)

# The newest Python that requirements.txt has versions for: pyenv's, else what the shell finds.
NEWEST ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python3.13) python3.13)
SAMPLE := $(addprefix tests/test_,aggregate.py any_data.py checkpoints.py cli.py convert.py experiment.py golden.py \
  golden_vits.py reference.py tasks_partition.py)

.PHONY: demo test test-newest test-long test-extras test-accelerators mutants lint lock docs docs-serve wheel-check release clean

demo: .venv/ready
	$(BIN)/fcljax run fppl --out $(RUN)/fppl
	$(BIN)/fcljax run fedavg --out $(RUN)/fedavg
	$(BIN)/fcljax compare $(RUN)/fppl $(RUN)/fedavg

test: .venv/ready lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

# A sample of the suite on the newest Python, with the newest JAX that it can have: the engine, the golden numbers of all
# methods, data, weights and the command line.
test-newest: .venv/newest/ready
	PYTHONDONTWRITEBYTECODE= .venv/newest/bin/python -m pytest -n 2 --dist loadfile -m "not long" $(SAMPLE)

# What is long and rarely breaks. Then the tests of the benches, with the fixtures of tests/conftest.py.
test-long: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long
	PYTHONPATH=tests $(BIN)/python -m pytest -n 2 --dist loadfile -m "" -p conftest experiments/tests

# What is skipped where extras are missing: Flower, trackers, Ray and Slurm, tuning, type checkers, the site and the
# notebook. Then checkpoints of other libraries against these libraries themselves, and the install lines of all pages.
test-extras: .venv/extras/ready .venv/weights/ready
	.venv/extras/bin/python -m pytest -n 2 --dist loadfile tests/test_flower.py tests/test_trackers.py \
	  tests/test_sweeps.py tests/test_docs.py tests/test_tuning.py
	.venv/extras/bin/python -m pytest -n 0 -m "" tests/test_types.py
	JAX_PLATFORMS=cpu nice -n 19 .venv/weights/bin/python experiments/checkpoint_sweep.py
	.venv/weights/bin/python -m pytest -n 0 tests/test_export.py
	INSTALL_LINES=1 .venv/extras/bin/python -m pytest -n 0 -m "" tests/test_install_lines.py

# Compiles a round of the five papers' methods for chips that are not here; hours of CPU time.
test-accelerators: .venv/aot/ready
	JAX_PLATFORMS=cpu nice -n 19 .venv/aot/bin/python experiments/accelerators.py

# Small errors that the tests must catch, a fixed sample: docs/testing.md.
mutants: .venv/ready
	$(BIN)/python experiments/mutate.py --kept

lint: .venv/ready
	$(BIN)/ruff check fcljax tests experiments
	$(BIN)/pyrefly check --output-format min-text

# Rewrites requirements.txt: what setup.cfg allows, for each version of Python the newest that it can have, with hashes.
# Versions that requirements.txt has stay as long as they are allowed; delete it first to renew them all.
lock:
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/python -m pip install --quiet uv
	.venv/lock/bin/uv pip compile setup.cfg --extra test --universal --generate-hashes --python-version 3.11 \
	  --no-emit-index-url --custom-compile-command 'make lock' --output-file requirements.txt

# The site, into build/site; a broken link is an error.
docs: .venv/docs
	$(BIN)/python -m mkdocs build --strict

docs-serve: .venv/docs
	$(BIN)/python -m mkdocs serve

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --editable '.[docs,notebook,release]'
	touch $@

.venv/newest/ready: requirements.txt setup.cfg pyproject.toml
	$(NEWEST) -m venv .venv/newest
	.venv/newest/bin/python -m pip install --quiet --requirement requirements.txt
	.venv/newest/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# An environment of its own: Flower wants older versions of what `make test` runs with.
.venv/extras/ready: .venv/ready
	$(PYTHON) -m venv .venv/extras
	.venv/extras/bin/python -m pip install --quiet --requirement requirements.txt
	.venv/extras/bin/python -m pip install --quiet --editable \
	  '.[docs,flower,mlflow,notebook,ray,slurm,tensorboard,tune,types,wandb]'
	touch $@

# An environment of its own: the libraries whose checkpoints are read, which `make test` does not need.
.venv/weights/ready: .venv/ready
	$(PYTHON) -m venv .venv/weights
	.venv/weights/bin/python -m pip install --quiet --requirement requirements.txt
	.venv/weights/bin/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1 timm==1.0.31 \
	  transformers==5.24.0 open_clip_torch==3.3.0 peft==0.21.2
	.venv/weights/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# An environment of its own: a run must not find the compilers' plugins for chips that are not here.
.venv/aot/ready: .venv/ready
	$(PYTHON) -m venv .venv/aot
	.venv/aot/bin/python -m pip install --quiet --requirement requirements.txt
	.venv/aot/bin/python -m pip install --quiet --editable '.[accelerators-aot]'
	touch $@

# Wheel and sdist, each installed into a fresh environment and run there.
wheel-check: .venv/docs
	$(BIN)/python experiments/wheel_check.py

# What is uploaded to PyPI, into dist: as `wheel-check`, with metadata checked by twine and the demo run from the wheel.
release: .venv/docs
	$(BIN)/python experiments/wheel_check.py --release dist

# Made anew when what it installs changes; the file at the end says that the installation is complete.
.venv/ready: requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv build *.egg-info
