# `make demo` and `make test` are all that a fresh machine needs: they make .venv, install, and run. Both can be repeated.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test test-long mutants lint clean

demo: .venv/ready
	$(BIN)/fcljax run fppl --out $(RUN)/fppl
	$(BIN)/fcljax run fedavg --out $(RUN)/fedavg
	$(BIN)/fcljax compare $(RUN)/fppl $(RUN)/fedavg

test: .venv/ready lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

# What is long and rarely breaks.
test-long: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

# Small errors that the tests must catch, a fixed sample: docs/testing.md.
mutants: .venv/ready
	$(BIN)/python experiments/mutate.py --kept

lint: .venv/ready
	$(BIN)/ruff check fcljax tests experiments
	$(BIN)/pyrefly check --output-format min-text

# Made anew when what it installs changes; the file at the end says that the installation is complete.
.venv/ready: requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv build *.egg-info
