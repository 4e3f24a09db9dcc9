# Thin: the work is done by scripts/set_up.py, setup.py, pytest and the scripts of examples/ and benchmarks/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# the first of these that runs (a name on PATH may be a version manager's that has no such version)
PYTHON ?= $(shell for name in python3.11 python3; do $$name -c '' 2>/dev/null && { command -v $$name; break; }; done)
WITH_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" PYTHONPATH=

# the tests marked slow run where nobody waits for them
ifeq ($(CI),true)
SLOW := --slow
endif
PYTEST_OPTIONS ?=

.PHONY: help setup data demo demo-ddp demo-tf recommender test test-fast lint docs bench bench-schedule bench-auto bench-replay bench-hosts time-to-accuracy accuracy gpu-check asan fuzz clean distclean python

help:
	@echo 'make setup      .venv, pinned packages, Horovod, this package, data    6 min the first time, 5 s after'
	@echo 'make data       the two public data sets into the cache, checked      10 s'
	@echo 'make demo       set-up, then the main job under horovodrun -np 2      8 min after set-up'
	@echo 'make demo-ddp   the same job in PyTorch DDP under torchrun            5 min after set-up'
	@echo 'make demo-tf    the same job in Keras on TensorFlow                   7 min after set-up'
	@echo 'make recommender  set-up, then embeddings on MovieLens-100k, two ranks    4 min after set-up'
	@echo 'make test       set-up, then the tests (CI=true: the slow ones too)   7 min after set-up, 25 to 50 with the slow ones'
	@echo 'make test-fast  set-up, then some cases of each single-process test   1 min after set-up'
	@echo 'make lint       set-up, then ruff, clang-format and mypy                20 s after set-up'
	@echo 'make docs       the documentation as HTML in build/docs/html          20 s after set-up'
	@echo 'make bench      set-up, then the table of benchmarks                  10 min after set-up'
	@echo 'make bench-schedule  set-up, then the merge program and predicted steps    1 min after set-up'
	@echo 'make bench-auto     set-up, then training steps with fixed settings and schedule="auto", and predictions    35 min, needs root'
	@echo 'make bench-replay   set-up, then steps of four networks on 2 hosts, with a backward pass that sleeps    20 min, needs root'
	@echo 'make bench-hosts  set-up, then steps between 2 and 4 hosts over shaped links    35 min, needs root'
	@echo 'make time-to-accuracy  set-up, then training on 2 hosts until a test accuracy    40 min, needs root; goes on where it stopped'
	@echo 'make accuracy   set-up, then tasks trained to the end on simulated ranks    hours; goes on where it stopped'
	@echo 'make gpu-check  CUDA operators: build, byte-equality, sanitizer, speed   5 min, needs a GPU, nvcc and a PyTorch with CUDA (PYTHON=)'
	@echo 'make asan       corruption tests under Address- and UBSanitizer       2 min'
	@echo 'make fuzz       libFuzzer on the decoder for FUZZ_SECONDS=60          2 min, needs clang'
	@echo 'make clean      removes what was built here; distclean removes .venv too (the cache stays)'

python:
	@test -n '$(PYTHON)' || { echo 'set-up stops before building anything: expected Python 3.11, got no python3 that runs;' \
	  'Debian packages: python3.11 python3.11-venv libpython3.11-dev' >&2; exit 1; }

setup: python
	@"$(PYTHON)" scripts/set_up.py

data: python
	@"$(PYTHON)" scripts/set_up.py --data

# DEMO_OPTIONS='--seeds 3' repeats the rows with other seeds
demo: setup
	$(WITH_VENV) python examples/demo.py $(DEMO_OPTIONS)

demo-ddp: setup
	$(WITH_VENV) python examples/demo_ddp.py

demo-tf: setup
	$(WITH_VENV) python examples/demo_tensorflow.py

recommender: setup
	$(WITH_VENV) python examples/recommender.py

test: setup
	$(WITH_VENV) python scripts/run_tests.py $(SLOW) $(PYTEST_OPTIONS)

# the inner loop: no horovodrun, no builds, no emulated device, at most four cases of each test
test-fast: setup
	$(WITH_VENV) python scripts/run_tests.py --fast $(PYTEST_OPTIONS)

CXX_SOURCES = $(shell find deepreduce_hvd torch_ops tf_ops tests benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

lint: setup
	$(WITH_VENV) ruff check .
	$(WITH_VENV) ruff format --check --quiet .
	@echo 'clang-format of $(words $(CXX_SOURCES)) files'
	@$(WITH_VENV) clang-format --dry-run --Werror $(CXX_SOURCES)
	$(WITH_VENV) mypy

docs: setup
	$(WITH_VENV) python -m sphinx -W --keep-going -q -b html docs build/docs/html
	@echo 'build/docs/html/index.html'

bench: setup
	$(WITH_VENV) python benchmarks/run.py

bench-schedule: setup
	$(WITH_VENV) python benchmarks/schedule.py

# BENCH_AUTO_OPTIONS='--links 1gbit' runs a part
bench-auto: python
	@"$(PYTHON)" scripts/preflight.py --hosts
	@$(MAKE) --no-print-directory setup
	$(WITH_VENV) python benchmarks/auto_schedule.py $(BENCH_AUTO_OPTIONS)
	$(WITH_VENV) python benchmarks/whole_step.py
	$(WITH_VENV) python benchmarks/changing_link.py
	$(WITH_VENV) python benchmarks/more_ranks.py

# BENCH_REPLAY_OPTIONS='--networks resnet50 --links 1gbit' runs a part
bench-replay: python
	@"$(PYTHON)" scripts/preflight.py --hosts
	@$(MAKE) --no-print-directory setup
	$(WITH_VENV) python benchmarks/replay.py $(BENCH_REPLAY_OPTIONS)

# ACCURACY_OPTIONS='--tasks resnet --seeds 0-4 --jobs 2' runs a part, 2 runs at a time
accuracy: setup
	$(WITH_VENV) PYTHONPATH=examples python benchmarks/accuracy/run.py $(ACCURACY_OPTIONS)

# BENCH_HOSTS_OPTIONS='--hosts 2 --links 1gbit' runs a part
bench-hosts: python
	@"$(PYTHON)" scripts/preflight.py --hosts
	@$(MAKE) --no-print-directory setup
	$(WITH_VENV) python benchmarks/hosts.py $(BENCH_HOSTS_OPTIONS)

# TIME_TO_ACCURACY_OPTIONS='--rows default --links 1gbit --again' runs a part
time-to-accuracy: python
	@"$(PYTHON)" scripts/preflight.py --hosts
	@$(MAKE) --no-print-directory setup
	$(WITH_VENV) python benchmarks/time_to_accuracy.py $(TIME_TO_ACCURACY_OPTIONS)

# with the PyTorch of PYTHON, not that of .venv, which has no CUDA; GPU_CHECK_OPTIONS=--dry-run does what can be done without a GPU
gpu-check:
	@"$(or $(PYTHON),python3)" scripts/gpu_check.py $(GPU_CHECK_OPTIONS)

# The native harnesses: a main() in tests/native/corruption.cc that takes no arguments and exits 0 when all is well, and
# LLVMFuzzerTestOneInput in tests/native/fuzz_decode.cc. Both include "api/deepreduce.h" and are linked with the whole core.
CORE := $(shell find deepreduce_hvd/csrc -name '*.cc' ! -path deepreduce_hvd/csrc/api/python.cc | sort)
JOBS := $(shell nproc)
CXX ?= g++
CLANG ?= clang++
FUZZ_SECONDS ?= 60
HARNESS_FLAGS := -std=c++17 -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all -ffp-contract=off -Wall -Wextra -Ideepreduce_hvd/csrc -MMD -MP
ASAN_FLAGS := $(HARNESS_FLAGS) -fsanitize=address,undefined
FUZZ_FLAGS := $(HARNESS_FLAGS) -fsanitize=address,undefined,fuzzer-no-link
ASAN_OBJECTS := $(CORE:%.cc=build/asan/%.o) build/asan/tests/native/corruption.o
FUZZ_OBJECTS := $(CORE:%.cc=build/fuzz/%.o) build/fuzz/tests/native/fuzz_decode.o

build/asan/%.o: %.cc Makefile
	@mkdir -p $(@D)
	@$(CXX) $(ASAN_FLAGS) -c $< -o $@
build/asan/corruption: $(ASAN_OBJECTS)
	$(CXX) -fsanitize=address,undefined $^ -lz -o $@
build/fuzz/%.o: %.cc Makefile
	@mkdir -p $(@D)
	@$(CLANG) $(FUZZ_FLAGS) -c $< -o $@
build/fuzz/fuzz_decode: $(FUZZ_OBJECTS)
	$(CLANG) -fsanitize=address,undefined,fuzzer $^ -lz -o $@

asan:
	@$(MAKE) --no-print-directory -j$(JOBS) build/asan/corruption
	UBSAN_OPTIONS=print_stacktrace=1 build/asan/corruption

fuzz:
	@command -v $(CLANG) >/dev/null || { echo 'make fuzz: expected $(CLANG) on PATH, got none; Debian packages: clang libclang-rt-14-dev' >&2; exit 1; }
	@$(MAKE) --no-print-directory -j$(JOBS) build/fuzz/fuzz_decode
	@mkdir -p build/fuzz/corpus
	@for file in tests/conformance/golden/v1/*.hex; do \
	  tr -d ' \n' <$$file | sed 's/../\\x&/g' | xargs -0 printf >build/fuzz/corpus/$$(basename $$file .hex); done
	build/fuzz/fuzz_decode -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -artifact_prefix=build/fuzz/ build/fuzz/corpus

-include $(ASAN_OBJECTS:.o=.d) $(FUZZ_OBJECTS:.o=.d)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis deepreduce_hvd/*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
