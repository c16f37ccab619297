# Two commands matter: `make demo` and `make test`. Each does all set-up itself; what is done already takes seconds.
SHELL := /bin/bash
.DEFAULT_GOAL := help
JOBS ?= $(shell nproc)
PYTHON = $$(cat .violin/python)
CONFIGURE = cmake --preset $(1) -DVIOLIN_PYTHON="$(PYTHON)" --log-level=NOTICE

.PHONY: help setup configure build demo test check-format format lint asan tsan debug bench gpu-test gpu-sanitize gpu-bench install clean distclean

help:  ## This list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup:
	@bash tools/setup.sh

configure: setup
	@[ -e build/build.ninja ] || $(call CONFIGURE,release)

build: configure  ## Set-up and release build: build/violin, build/libviolin_ops.so
	@cmake --build build -j $(JOBS)

demo: configure  ## Train with and without the mask on embedded images, compare, report: out/demo, three minutes
	@cmake --build build -j $(JOBS) --target violin
	@build/violin demo --force $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(SEEDS),--seeds "$(SEEDS)") $(if $(THREADS),--threads $(THREADS))

test: check-format build  ## Everything that CI checks
	@ctest --test-dir build --output-on-failure -j $(JOBS)

check-format: setup
	@bash tools/format.sh --check

format: setup  ## clang-format over all C++ and CUDA files
	@bash tools/format.sh

lint:  ## clang-tidy over the changed files; LINT=all for every file
	@bash tools/setup.sh lint
	@$(call CONFIGURE,lint)
	@bash tools/lint.sh $(LINT)

asan: setup  ## The test suite under address and undefined-behaviour sanitizers
	@[ -e build-asan/build.ninja ] || $(call CONFIGURE,asan)
	@cmake --build build-asan -j $(JOBS)
	@ctest --test-dir build-asan --output-on-failure -j $(JOBS)

tsan: setup  ## The CPU kernels' tasks on plain threads under the thread sanitizer
	@[ -e build-tsan/build.ninja ] || $(call CONFIGURE,tsan)
	@cmake --build build-tsan -j $(JOBS) --target kernels_test
	@build-tsan/bin/kernels_test

debug: setup  ## Unoptimised build in build-debug
	@[ -e build-debug/build.ninja ] || $(call CONFIGURE,debug)
	@cmake --build build-debug -j $(JOBS)

bench: configure  ## Ratios against peers, measured now
	@cmake --build build -j $(JOBS) --target violin
	@bash tools/bench.sh

gpu-test: configure  ## The kernels and operators on this machine's GPU, on both paths
	@cmake --build build -j $(JOBS) --target violin_cuda_kernels_api violin_ops nn_test
	@$(PYTHON) tests/cuda/check_kernels.py build/libviolin_cuda_kernels_api.so
	@build/bin/nn_test --gtest_filter='Gpu*'
	@$(PYTHON) tests/cuda/test_operators.py build/libviolin_ops.so
	@VIOLIN_PATH=sm80 $(PYTHON) tests/cuda/test_operators.py build/libviolin_ops.so

gpu-sanitize: setup  ## The CUDA kernels on small shapes under compute-sanitizer's memcheck, synccheck and racecheck
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit"; exit 1; }
	@[ -e build-gpu-sanitize/build.ninja ] || $(call CONFIGURE,gpu-sanitize)
	@cmake --build build-gpu-sanitize -j $(JOBS) --target violin_cuda_kernels_api
	@for tool in memcheck synccheck racecheck; do echo "$$tool:"; \
	  compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) tests/cuda/sanitize.py build-gpu-sanitize/libviolin_cuda_kernels_api.so || exit 1; done

gpu-bench: configure  ## Attention on this machine's GPU against cuDNN, FlashAttention-2, FlexAttention and the formula
	@cmake --build build -j $(JOBS) --target violin_ops
	@$(PYTHON) bench/gpu/attention.py build/libviolin_ops.so --layout both

install: build  ## Headers, libraries, binary and CMake package into PREFIX
	@cmake --install build --prefix "$${PREFIX:?usage: make install PREFIX=/some/where}"

clean:  ## Remove what builds made
	@rm -rf build build-debug build-asan build-tsan build-lint build-gpu-sanitize out

distclean: clean
	@rm -rf .venv .violin
