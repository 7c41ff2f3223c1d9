# Names for what is done with this project; CMake presets do the work.

JOBS ?= $(shell nproc)
# Labels of which `make test` must have run at least one test each.
TEST_LABELS := unit ranks mpi

.DEFAULT_GOAL := build
.NOTPARALLEL:  # prerequisites are steps in order; Ninja and CTest run in parallel inside one
.PHONY: build setup setup-lint demo test bench lint format asan tsan clean help

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

setup-lint:
	@tools/setup lint

demo: setup build  ## a first look: the machine, checks against the oracle, decoding over 4 ranks
	build/bin/treeline info
	build/bin/treeline verify --cases 200
	build/bin/treeline verify --ranks 1,2,3,4 --cases 5
	build/bin/treeline bench kernel --quick
	build/bin/treeline bench decode --ranks 4 --context 16384 --node-size 2 --explain

test: setup build  ## all tests, with a summary by label
	$(call run_tests,release,build)

bench: setup build  ## kernels against limits measured in the same run; also build/bench.json
	build/bin/treeline bench kernel --json build/bench.json

lint: setup-lint build  ## layout, static analysis, layering
	@tools/lint build

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
