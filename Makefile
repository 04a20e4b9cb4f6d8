# `make demo` and `make test` do the whole set-up on a fresh clone; a second run starts at once.
#
#   make test TORCH=torch==2.11.0 THUNDER=lightning-thunder==0.2.7.dev20260201 VENV=.venv-other
#   make test PYTEST_ARGS='-k buckets -x'
#   make demo DEMO_ARGS='--help'

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# The latest release, for users, CI and the documentation: a release stays on the package index, nightly builds may vanish.
THUNDER ?= lightning-thunder==0.2.6
# The last nightly build, and the tests of what depends most on Thunder's internals, which also run on it.
NIGHTLY ?= lightning-thunder==0.2.7.dev20260201
NIGHTLY_TESTS := tests/test_core.py tests/agreement/test_agreement.py tests/capture/test_module_calls.py \
	tests/capture/test_symbolic_sizes.py tests/planning/test_planned_steps.py \
	tests/training/test_windows.py::test_only_the_first_micro_batch_of_a_window_gathers \
	tests/training/test_windows.py::test_a_memory_limit_that_only_reduced_gradients_keep_makes_each_micro_batch_reduce
PYTEST_ARGS ?=
DEMO_ARGS ?=
MUTATE_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Of what pip installs a quarter is ever imported, so only that is compiled: at its first import, by whoever imports it.
INSTALL := $(PIP) install --no-compile
export PYTHONDONTWRITEBYTECODE :=

# A stamp carries the versions in its name: with other versions the packages are installed anew.
VERSIONS := $(subst =,,$(TORCH)-$(THUNDER))
BASE := $(VENV)/.ready-$(VERSIONS)
DEV := $(BASE)-dev
NOTEBOOK := $(BASE)-notebook
EVERYTHING := $(BASE)-everything
MODELS := $(BASE)-models
# LitGPT allows only old versions of a package that the current transformers and diffusers need, so they are apart.
LIBRARIES_VENV := $(VENV)/libraries
LIBRARIES := $(LIBRARIES_VENV)/.ready-$(VERSIONS)
DOCS := $(BASE)-docs
NIGHTLY_VENV := $(VENV)/nightly
ON_NIGHTLY := $(NIGHTLY_VENV)/.ready-$(VERSIONS)-$(subst =,,$(NIGHTLY))
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.PHONY: help setup everything demo test freeze mutate nightly test-nightly models lint format types docs imports wheel notebooks clean distclean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a small GPT on 2 ranks and show the traces"
	@echo "make test       run the tests                    make test-nightly  some of them on a nightly build of Thunder"
	@echo "make freeze     write the digests of traces anew, which the tests compare"
	@echo "make mutate     change the core in one place at a time and list the changes that no test notices (hours)"
	@echo "make models     install LitGPT, transformers, timm and diffusers, train their models beside FSDP2"
	@echo "make lint       ruff: rules and format      make format   let ruff mend what it can"
	@echo "make types      mypy                             make imports  which room imports which"
	@echo "make docs       build the documentation strictly (into build/site)"
	@echo "make wheel      build wheel and sdist, install the wheel elsewhere, import it"
	@echo "make notebooks  run the notebooks"
	@echo "make setup      only install (into $(VENV))   make everything   with what docs and notebooks need"
	@echo "make clean      remove what was built         make distclean    $(VENV) too"

demo: $(BASE)
	$(PY) examples/demo.py $(DEMO_ARGS)

test: $(DEV)
	$(PY) -m pytest -q -n 2 --dist worksteal $(PYTEST_ARGS)

freeze: $(DEV)
	PYTHONPATH=.:examples $(PY) tests/freeze.py update

mutate: $(DEV)
	$(PY) tests/mutate.py $(MUTATE_ARGS)

test-nightly: nightly
	$(NIGHTLY_VENV)/bin/python -m pytest -q -n 2 --dist worksteal $(NIGHTLY_TESTS) $(PYTEST_ARGS)

nightly: $(ON_NIGHTLY)

# Each test already keeps two processes busy, so one at a time.
models: $(MODELS) $(LIBRARIES)
	$(PY) -m pytest -q -rP tests/real_models -k "not architectures or litgpt" $(PYTEST_ARGS)
	$(LIBRARIES_VENV)/bin/python -m pytest -q -rP tests/real_models/test_architectures.py $(PYTEST_ARGS)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(DEV)
	$(PY) -m mypy

imports: $(DEV)
	$(VENV)/bin/lint-imports

# Not --quiet, which keeps warnings from being counted.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "the documentation is in build/site"

# The wheel is built from the sdist and installed into an empty venv that sees this one's torch and thunder through a
# .pth file (which does not make it see the editable install), then imported from an empty folder.
wheel: $(DEV)
	rm -rf build dist
	$(PY) -m build --no-isolation --outdir dist . >/dev/null
	@ls -1 dist
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PY) -m venv --without-pip "$$tmp/venv"; \
	site=$$("$$tmp/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$site/dependencies.pth"; \
	$(PIP) --python "$$tmp/venv/bin/python" install --no-deps --no-index dist/*.whl; \
	cd "$$tmp"; "$$tmp/venv/bin/python" -I -c "$$IMPORT_CHECK"

define IMPORT_CHECK
import importlib.util
import pathlib
import sys

import thunder_fsdp_sched
import thunder_fsdp_sched.transforms
import thunder_fsdp_sched.transports
import thunder

home = pathlib.Path(sys.prefix).resolve()
for module in (thunder_fsdp_sched, thunder_fsdp_sched.transforms, thunder_fsdp_sched.transports):
    where = pathlib.Path(module.__file__).resolve()
    assert home in where.parents, f"{module.__name__} was imported from {where}, not from the wheel"
assert (pathlib.Path(thunder_fsdp_sched.__file__).parent / "py.typed").is_file(), "py.typed is not in the wheel"
for name in ("transforms", "transports"):
    assert importlib.util.find_spec(name) is None, f"the wheel installs a global package {name}"
print("the wheel imports from an empty folder, with transforms inside the package and no global transforms")
endef
export IMPORT_CHECK

# The plugin would import Thunder where no notebook runs.
ifeq ($(NOTEBOOKS),)
notebooks:
	@echo "no notebooks yet"
else
# One after the other: two kernels that start at once may choose the same port.
notebooks: $(NOTEBOOK)
	$(PY) -m pytest -q -p no:thunder_fsdp_sched --nbmake --nbmake-timeout=1200 $(NOTEBOOKS)
endif

setup: $(DEV)

everything: $(EVERYTHING)

define NEW_VENV
test -x $(PY) || $(PYTHON) -m venv $(VENV)
rm -f $(VENV)/.ready-*
$(INSTALL) '$(TORCH)'
endef

$(BASE): pyproject.toml
	@echo "installing $(TORCH) and $(THUNDER) into $(VENV) ..."
	$(NEW_VENV)
	$(INSTALL) '$(TORCH)' '$(THUNDER)' -e .
	@touch $@

# For .ci/run: pip resolves and builds once, not once for each check.
$(EVERYTHING): $(BASE)
	@echo "installing what all checks need into $(VENV) ..."
	$(INSTALL) '$(TORCH)' '$(THUNDER)' -e '.[dev,plot,docs,notebook-tests]'
	@$(PY) -c 'import hypothesis, ipykernel.kernelapp, matplotlib.pyplot, mkdocs.commands.build, nbmake, pytest' & \
	$(PY) -c 'import thunder_fsdp_sched, torch.distributed.checkpoint, torch._inductor.compile_fx' && wait $$!
	@touch $(DEV) $(DOCS) $(NOTEBOOK) $@

# It takes all other packages from $(VENV), the editable one included.
$(ON_NIGHTLY): $(DEV)
	@echo "installing $(NIGHTLY) into $(NIGHTLY_VENV) ..."
	rm -rf $(NIGHTLY_VENV)
	$(PY) -m venv --without-pip $(NIGHTLY_VENV)
	@$(PIP) --python $(NIGHTLY_VENV)/bin/python install --no-compile --no-deps '$(NIGHTLY)' || { \
		echo "$(NIGHTLY) cannot be installed. If the package index no longer has it, name another build, or none, in" \
		"Makefile, .ci/versions and docs/models.md."; exit 1; }
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(NIGHTLY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/other_packages.pth"
	@touch $@

$(DEV): $(BASE)
	@echo "installing what the tests and checks need ..."
	$(INSTALL) '$(TORCH)' '$(THUNDER)' -e '.[dev,plot]'
	@touch $@

$(MODELS): $(DEV)
	@echo "installing libraries of models ..."
	$(INSTALL) '$(TORCH)' '$(THUNDER)' -e '.[dev,models]'
	@touch $@

$(LIBRARIES): $(DEV)
	@echo "installing transformers, timm and diffusers into $(LIBRARIES_VENV) ..."
	test -x $(LIBRARIES_VENV)/bin/python || $(PYTHON) -m venv $(LIBRARIES_VENV)
	$(PIP) --python $(LIBRARIES_VENV)/bin/python install --no-compile '$(TORCH)'
	$(PIP) --python $(LIBRARIES_VENV)/bin/python install --no-compile '$(TORCH)' '$(THUNDER)' -e '.[dev,architectures]'
	@touch $@

$(DOCS): $(BASE)
	@echo "installing what the documentation needs ..."
	$(INSTALL) '$(TORCH)' '$(THUNDER)' -e '.[docs]'
	@touch $@

$(NOTEBOOK): $(BASE)
	@echo "installing what the notebooks need ..."
	$(INSTALL) '$(TORCH)' '$(THUNDER)' -e '.[notebook-tests]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
