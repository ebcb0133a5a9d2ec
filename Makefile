# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-cluster check install clean

demo: $(VENV)/.installed
	$(BIN)/c2cserve demo $(if $(KEEP),--keep)

test: $(VENV)/.installed
	scripts/test

# Beside `make test`: several nodes on a real Ray cluster, on this machine.
test-cluster: $(VENV)/.installed
	scripts/test-cluster

check: $(VENV)/.installed
	scripts/check

install: $(VENV)/.installed

# Rebuilt when the dependencies or the native code change.
$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/c2cserve/kernels/cpu/* src/c2cserve/kernels/cpu/*/* src/c2cserve/transfer/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	scripts/install $(BIN)/python
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info src/c2cserve/kernels/*.so
