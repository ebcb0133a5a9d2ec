# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check install clean

demo: $(VENV)/.installed
	$(BIN)/c2cserve demo $(if $(KEEP),--keep)

test: $(VENV)/.installed
	scripts/test

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
