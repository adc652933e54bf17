# make demo   trains RaMBO against two losses of pytorch-metric-learning on real images, writes runs/demo/
# make test   lint, types and tests
# make slow   the tests marked slow
# make clean  removes the environment and the caches
#
# Each target makes .venv first, from pyproject.toml and constraints.txt, and reuses it while neither has changed. The
# tests add mmdet to it, whose mmcv compiles its operators: some ten minutes on two cores, with a C++ compiler; and
# detectron2, unless it is there already, as the Python code of the package that carries it on PyPI.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow format clean

demo: .venv/installed
	$(BIN)/python -m rambo_plugins.demo $(ARGS)

test: .venv/detectron2
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

slow: .venv/detectron2
	$(BIN)/python -m pytest -m slow

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'rambo_plugins needs Python 3.10 or newer; run make PYTHON=/path/to/python3')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv/mmdet: .venv/installed
	$(BIN)/python -m pip install --constraint constraints.txt "setuptools>=77" wheel ninja psutil
	PATH="$(CURDIR)/$(BIN):$$PATH" MMCV_WITH_OPS=1 FORCE_CUDA=0 MAX_JOBS=2 CFLAGS="-O1 -g0" \
		$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation onedl-mmcv
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev,mmdet]"
	touch $@

.venv/detectron2: .venv/mmdet
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev,mmdet,detectron2]"
	$(BIN)/python -c "import detectron2" || $(BIN)/python -m pip install --no-deps --only-binary=:all: \
		--python-version 3.10 --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		sal-detectron2==0.7.2
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build *.egg-info
