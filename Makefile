# One word for each intent, the same here and in CI. Each sets itself up in .venv; a second call is instant.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
comma := ,

.DELETE_ON_ERROR:
.PHONY: help demo test check bench test-crash clean

help:
	@echo "make demo        digits on two workers, killed twice, nothing lost (a minute after installation)"
	@echo "make test        the tests"
	@echo "make check       style, types, import layers"
	@echo "make bench       figures, against Ray and against the limits of this machine"
	@echo "make test-crash  what is long, or needs root, ptrace or mounts"
	@echo "make clean       removes .venv and caches"

demo: $(VENV)/installed-demo
	@$(RUN) -m demo

test: $(VENV)/installed-test
	@$(RUN) -m pytest -q

check: $(VENV)/installed-check
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --check --quiet .
	@$(RUN) -m mypy
	@$(VENV)/bin/lint-imports

bench: $(VENV)/installed-test
	@$(RUN) -m bench

test-crash: $(VENV)/installed-test
	@$(RUN) -m tests.crash

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# $(1): extras. With -qq pip shows errors and nothing else; the stamp is made only after success.
define install
@echo "Installing holdfast[$(1)] into $(VENV); the first time, this takes a minute or two"
@$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
@touch $@
endef

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python %d.%d found, 3.10 or newer needed: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/installed-demo: pyproject.toml constraints.txt | $(VENV)/made
	$(call install,demo)

$(VENV)/installed-check: pyproject.toml constraints.txt | $(VENV)/made
	$(call install,dev)

$(VENV)/installed-test: pyproject.toml constraints.txt | $(VENV)/made
	$(call install,demo$(comma)dev$(comma)pandas$(comma)torch)
