# Everything starts here: `make` lists the targets. Nothing has to be installed or activated beforehand.
.DEFAULT_GOAL := help
.PHONY: help setup book pdf test lint outputs address picture data bench reproduce student slides lab clean \
  train shell portable colab

PY := .venv/bin/python
CORES ?= 2
NB ?= $(wildcard notebooks/*.ipynb)

# What belongs to the user's own environment must not change what is built here, nor slow it (imports without stored bytecode take twice as long).
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONDONTWRITEBYTECODE VIRTUAL_ENV CONDA_PREFIX MPLBACKEND MATPLOTLIBRC
export IPYTHONDIR := $(CURDIR)/_build/.ipython
export MPLCONFIGDIR := $(CURDIR)/_build/.matplotlib
export JUPYTER_PREFER_ENV_PATH := 1
export PYTHONHASHSEED := 0
# Small tensors: one thread per process is faster than two, by far on a busy machine.
export OMP_NUM_THREADS ?= 1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv and install the tested versions (every target does this by itself)
	@tools/setup.sh
	@mkdir -p "$$IPYTHONDIR/profile_default" "$$MPLCONFIGDIR"
	@echo "c.Application.log_level = 40  # kernels report errors only" > "$$IPYTHONDIR/profile_default/ipython_kernel_config.py"

book: setup ## execute the notebooks and build the book
	@tools/book.sh

pdf: setup ## print the whole book into _build/pdf/book.pdf (needs Chromium; builds the book if need be)
	$(PY) tools/pdf.py

test: setup ## run the tests, then every notebook against its stored outputs
	$(PY) -m pytest -n $(CORES) tests/
	$(PY) -m pytest -n $(CORES) --dist loadfile --nbval -p no:cacheprovider notebooks/

portable: setup ## all tests and notebooks as on other machines: old processor, two threads (about 45 minutes)
	@tools/machines.sh $(ON) $(if $(WHAT),-- $(WHAT))

colab: setup ## run lesson 1 and train.ipynb as on Colab and on Binder, each in a fresh environment (about 10 minutes, 8 GB)
	$(PY) tools/colab.py

lint: setup ## check style and formatting of Python files and notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

outputs: setup ## execute notebooks in place and store their outputs (NB=notebooks/07_normalisation.ipynb for one)
	$(PY) tools/outputs.py $(NB)

address: setup ## after repository.url in _config.yml was changed: the notebooks' cell for Colab
	$(PY) tools/address.py

picture: setup ## draw the README's picture again
	$(PY) tools/picture.py

train: setup ## train a small certified model on digits, under a minute (A=0.4: the paper's model with that slope)
	$(PY) -m lipmdeq train $(if $(A),-p a $(A))

shell: setup ## open a shell in which python, papermill and snakemake are those of .venv
	@echo "Leave it with: exit" && PATH="$(CURDIR)/.venv/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" "$${SHELL:-/bin/sh}"

data: setup ## fetch the larger data sets into data/ (the default one needs no download)
	$(PY) -m lipmdeq data

bench: setup ## measure speed and memory as ratios (about 20 minutes; needs a quiet machine)
	$(PY) -m benchmarks --preset cpu
	$(PY) -m benchmarks --preset paper-cifar10
	@if [ -e runs/cpu/table1/mdeq/seed0/record.json ]; then $(PY) -m benchmarks.trained; \
	else echo "No trained models in runs/: their times are not measured (make reproduce trains them)."; fi

reproduce: setup ## run what is missing of the paper's tables and figures
	$(PY) -m snakemake --cores $(CORES)

slides: setup ## make the slides of the core lessons, _build/slides/index.html
	$(PY) tools/slides.py

student: setup ## write the student edition, without solutions, into _build/student
	$(PY) tools/student.py

lab: setup ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab notebooks/

clean: ## remove what was built; the environment stays (rm -rf .venv removes that)
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
