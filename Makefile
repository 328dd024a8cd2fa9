# Two commands for a fresh machine: `make demo` and `make test`. Both make their own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for processes and timers, so three processes with one thread each keep two cores busy.
JOBS ?= 3
# pip compiles all modules on one core, which takes half of the demo's installation. Only those that
# sandboxes import must be compiled before: sandboxes cannot write what they compile.
SANDBOXED := numpy pytest _pytest pluggy iniconfig packaging pygments
# What every test process imports: a fifth of 300 MB of modules. The rest is compiled when imported.
TESTED := torch triton transformers sympy mpmath scipy openai sqlalchemy pydantic hypothesis rich \
	huggingface_hub starlette anyio uvicorn httpx jinja2 click typer xdist
UNUSED := '(^|/)(tests|transformers/(models|cli|pipelines|exporters)|torch/(testing|_inductor|onnx)$\
	|sympy/(physics|stats|combinatorics|tensor)|scipy/(stats|signal|interpolate|ndimage))/'
# The extras that the suite tests.
EXTRAS := torch report models inspect postgres ray gguf hub serve sign test
COMMA := ,
SPACE := $(subst ,, )
# What fills the environment, and what `-e .` is built with: pip would make a second environment for
# the latter.
TOOLS := pip hatchling editables
BUILT_HERE = $$($(BIN)/python -c 'import hatchling, editables' 2>/dev/null && echo --no-build-isolation)
# Three processes collect the tests, and tests start graders: each would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE
SINGLE_THREADED := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test test-full lint types suite system docs clean

demo: $(VENV)/.demo
	$(BIN)/trapline demo

# The type checker uses one core for about a minute, beside the suite.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types suite

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

suite: $(VENV)/.test system
	$(SINGLE_THREADED) $(BIN)/pytest -n $(JOBS) --dist worksteal --durations=15 -m "not full"

test-full: $(VENV)/.test system
	TRAPLINE_HYPOTHESIS=long $(SINGLE_THREADED) $(BIN)/pytest -n $(JOBS) --dist worksteal

system:
	@bash scripts/system-packages.sh

# The pages of docs/ and a reference of the public names, as a site of files.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

# A pip that comes with the environment takes 5 s, only to be replaced. Where PYTHON's own cannot
# fill another environment, it has to.
$(VENV)/bin/python:
	$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $@ install --quiet --no-compile -c constraints.txt $(TOOLS) \
		2>/dev/null || { $(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet --upgrade \
		-c constraints.txt $(TOOLS); } || { rm -f $@; exit 1; }

# Of the extra `report` without pyarrow, 156 MB: the demo writes no Parquet.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --no-compile $(BUILT_HERE) -c constraints.txt -e . matplotlib
	@cd $(VENV)/lib/python3*/site-packages && \
		../../../bin/python -m compileall -qq -j 0 -x '/tests/' $(SANDBOXED) || true
	@touch $@

# pip resolves, unpacks and compiles on one core: uv fills the environment first, where it can.
$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	@$(BIN)/python scripts/prefill.py $(BIN)/python $(EXTRAS)
	$(BIN)/pip install --quiet --no-compile $(BUILT_HERE) -c constraints.txt \
		-e '.[$(subst $(SPACE),$(COMMA),$(EXTRAS))]'
	@cd $(VENV)/lib/python3*/site-packages && \
		../../../bin/python -m compileall -qq -j 0 -x $(UNUSED) $(SANDBOXED) $(TESTED) || true
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) runs site .mypy_cache .pytest_cache .ruff_cache
