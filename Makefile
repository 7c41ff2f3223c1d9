# Names for what is done with this project; CMake presets do the work.

JOBS ?= $(shell nproc)
# Labels of which `make test` must have run at least one test each.
TEST_LABELS := unit ranks mpi
FUZZ_SECONDS ?= 60

.DEFAULT_GOAL := build
.NOTPARALLEL:  # prerequisites are steps in order; Ninja and CTest run in parallel inside one
.PHONY: build setup setup-lint demo test bench compare lint fuzz format asan tsan clean help

# $(call configure,preset), $(call compile,preset). CMake runs the test programs to list their tests.
configure = cmake --preset $(1)
compile = $(launcher) cmake --build --preset $(1) --parallel $(JOBS)

# $(call run_tests,preset,build folder): the summary comes last, and whatever fails is kept.
define run_tests
@ctest --preset $(1) --show-only=json-v1 > $(2)/tests.json
@status=0; \
$(launcher) ctest --preset $(1) --parallel $(JOBS) --progress --no-label-summary \
      --test-output-size-passed 65536 --output-junit junit.xml || status=1; \
tools/test-summary $(2)/tests.json $(2)/junit.xml --expect $(TEST_LABELS) || status=1; \
exit $$status
endef

build: build/build.ninja  ## the program, build/bin/treeline (default)
	@$(call compile,release)

build/build.ninja: CMakePresets.json
	@$(call configure,release)

setup:
	@tools/setup
	@tools/third-party

setup-lint:
	@tools/setup lint
	@tools/third-party

demo: setup  ## a real model answers from a document that is spread over 4 ranks
	@$(call configure,release)
	@$(call compile,release) --target treeline_program
	build/bin/treeline info
	tools/demo

test: setup build  ## all tests, with a summary by label
	$(call run_tests,release,build)

compare: setup build  ## kernels, ranks and models, by turns with their peers; writes docs/results.md
	tools/compare --markdown docs/results.md

bench: setup build  ## kernels against limits measured in the same run; also build/bench.json
	build/bin/treeline bench kernel --json build/bench.json

lint: setup-lint build  ## layout, static analysis, layering
	@tools/lint build

fuzz: setup-lint  ## the reader of model files on broken ones, for FUZZ_SECONDS
	@$(call configure,fuzz)
	@$(call compile,fuzz)
	@tests/fuzz/make-corpus build/fuzz/corpus
	@mkdir -p build/fuzz/findings
	build/fuzz/gguf_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=65536 -rss_limit_mb=1024 -timeout=10 \
	    -print_final_stats=1 -artifact_prefix=build/fuzz/findings/ build/fuzz/corpus

format: setup-lint  ## lays out all C++ files as clang-format wants them
	@tools/format

asan: setup  ## all tests under the address and undefined-behaviour sanitizers
	@$(call configure,asan-ubsan)
	@$(call compile,asan-ubsan)
	$(call run_tests,asan-ubsan,build/asan-ubsan)

# Randomised addresses can clash with the ones that gcc's thread sanitizer needs; where the system
# lets a process switch them off, do.
tsan: launcher := $(shell setarch -R true 2>/dev/null && echo setarch -R)
tsan: TEST_LABELS := unit ranks  # Open MPI is not built for it
tsan: setup  ## all tests under the thread sanitizer
	@$(call configure,tsan)
	@$(call compile,tsan)
	$(call run_tests,tsan,build/tsan)

clean:  ## removes build/
	rm -rf build

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/make \1\t\2/p' Makefile | expand -t 14
