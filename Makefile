# make run        train the built-in example: digits, on this machine, adaptively
# make test       static checks, and the quick tests against the installed wheel
# make test-frameworks  Trainer, Accelerate, Lightning, data=hf, model=hf, submitit, sinks: an environment of their own
# make test-newest    the kernels' tests and the quick ones (QUICK: these files of them) with pip's newest torch and Triton
# make test-all   all tests, and docs; soak and repetition excepted (pytest -m long)
# make docs       builds the documentation site in build/site/html, and checks its links
# make lint       the static checks alone
# make reference  writes the tables of docs/reference.md and docs/support.md, which tests compare with the code

PYTHON ?= python3
VENV := .venv
TEST_VENV := .venv-test
FRAMEWORKS_VENV := .venv-frameworks
NEWEST_VENV := .venv-newest
DOCS_VENV := .venv-docs
# What is tested: this checkout, or a wheel (make test WHEEL=dist/kfuse-0.1.0-py3-none-any.whl).
WHEEL ?= .
INSTALL := -m pip --quiet --quiet --disable-pip-version-check install
# make test TORCH=2.14.1 (or test-all): with that torch and the Triton that pip brings for it, in environments of their own.
CONSTRAINTS := constraints.txt
ifdef TORCH
TEST_VENV := .venv-test-$(TORCH)
FRAMEWORKS_VENV := .venv-frameworks-$(TORCH)
CONSTRAINTS := build/constraints-$(TORCH).txt
MYPY_OPTIONS := --no-warn-unused-ignores  # what torch declares differs by version
endif
PIP := $(INSTALL) -c $(CONSTRAINTS)

.PHONY: run test test-all test-frameworks test-newest docs lint reference python clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(VENV)/bin/kfuse

PYTEST := cd tests && KFUSE_TEST_INSTALLED=1 ../$(TEST_VENV)/bin/pytest -n 2

# From tests/, where the checkout's kfuse/ is out of reach: what is tested is what users install. Two at a time: much of
# the time a test waits for processes to come up, or to be missed.
test: lint
	rm -rf build/lib build/bdist*
	$(TEST_VENV)/bin/python $(PIP) --no-build-isolation --no-deps --force-reinstall $(WHEEL)
	$(PYTEST) --dist loadfile -m "not full and not long"

# The jobs whose workers mostly wait for each other come first: beside busy processes each wait takes some milliseconds
# more, and they take five times as long.
test-all: test
	$(PYTEST) -m "full and jobs and not long"
	$(PYTEST) --dist loadfile -m "full and not jobs and not long"
	$(MAKE) test-frameworks docs

# Hugging Face's libraries, Lightning, submitit and the services for figures have an environment of their own.
test-frameworks: $(FRAMEWORKS_VENV)/.installed
	rm -rf build/lib build/bdist*
	$(FRAMEWORKS_VENV)/bin/python $(PIP) --no-build-isolation --no-deps --force-reinstall $(WHEEL)
	cd tests && KFUSE_TEST_INSTALLED=1 ../$(FRAMEWORKS_VENV)/bin/pytest -n 2 frameworks

# The kernels' first: the compiler's part of them takes a process for each core by itself.
test-newest: $(NEWEST_VENV)/.installed
	rm -rf build/lib build/bdist*
	$(NEWEST_VENV)/bin/python $(INSTALL) --no-build-isolation --no-deps --force-reinstall $(WHEEL)
	$(NEWEST_VENV)/bin/python -c 'import torch, triton; print("torch", torch.__version__, "and Triton", triton.__version__)'
	cd tests && KFUSE_TEST_INSTALLED=1 ../$(NEWEST_VENV)/bin/pytest test_kernels_aot.py test_kernels_interpreter.py
	cd tests && KFUSE_TEST_INSTALLED=1 ../$(NEWEST_VENV)/bin/pytest -n 2 --dist loadfile -m "not full and not long" $(QUICK)

# The pages lie in the tree that they have here, so that their links to each other and to files are the same.
docs: $(DOCS_VENV)/.installed
	rm -rf build/site
	mkdir -p build/site/pages
	cp -r --parents README.md CHANGELOG.md CONTRIBUTING.md docs examples benchmarks/*.md benchmarks/*.py benchmarks/elastic_systems benchmarks/results deploy tests/gpu build/site/pages
	cp site/api.md build/site/pages
	cp site/zensical.toml build/site
	cd build/site && $(CURDIR)/$(DOCS_VENV)/bin/zensical build --clean
	$(DOCS_VENV)/bin/python site/check_links.py build/site/html

lint: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check
	$(TEST_VENV)/bin/ruff format --check
	$(TEST_VENV)/bin/mypy $(MYPY_OPTIONS)
	$(TEST_VENV)/bin/lint-imports
	$(TEST_VENV)/bin/python .ci/ceilings.py

reference: $(VENV)/.installed
	$(VENV)/bin/python -m kfuse.tools.reference docs/reference.md docs/support.md

build/constraints-%.txt: constraints.txt
	mkdir -p build
	{ grep -vE '^(torch|triton)==' constraints.txt; echo torch==$*; } > $@

# `make run` uses the checkout itself (editable); `make test` uses a wheel, built anew each time.
$(VENV)/.installed: pyproject.toml constraints.txt | python
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python $(INSTALL) -c constraints.txt --editable .
	touch $@

$(TEST_VENV)/.installed: pyproject.toml $(CONSTRAINTS) | python
	$(PYTHON) -m venv --clear $(TEST_VENV)
	$(TEST_VENV)/bin/python $(PIP) setuptools
	$(TEST_VENV)/bin/python $(PIP) --no-build-isolation '.[test]'
	touch $@

# mosaicml-streaming 0.13 asks for older packages than these, and for clouds' own: its reader needs none of them.
$(FRAMEWORKS_VENV)/.installed: pyproject.toml $(CONSTRAINTS) | python
	$(PYTHON) -m venv --clear $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python $(PIP) setuptools
	$(FRAMEWORKS_VENV)/bin/python $(PIP) --no-build-isolation '.[transformers,lightning,slurm,wandb,mlflow,trackio]' \
		peft trl liger-kernel webdataset kubernetes-validate pytest pytest-timeout pytest-xdist hypothesis
	$(FRAMEWORKS_VENV)/bin/python $(PIP) brotli catalogue matplotlib python-snappy tqdm xxhash zstd
	$(FRAMEWORKS_VENV)/bin/python $(PIP) --no-deps mosaicml-streaming
	touch $@

# No constraints. torch's metadata ask for an older Triton than pip brings where torch is there already: hence the last.
$(NEWEST_VENV)/.installed: pyproject.toml | python
	$(PYTHON) -m venv --clear $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python $(INSTALL) --upgrade setuptools
	$(NEWEST_VENV)/bin/python $(INSTALL) --no-build-isolation '.[test]'
	$(NEWEST_VENV)/bin/python $(INSTALL) --no-deps --upgrade triton
	touch $@

$(DOCS_VENV)/.installed: constraints.txt | python
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) -c constraints.txt zensical mkdocstrings-python
	touch $@

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kfuse needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(VENV)-* build
