# The front door of the build; everything real is in CMakeLists.txt and scripts/.
#
#   make            build build/bin/kt and the tests; ISAS=avx2 or native compiles fewer instruction sets
#   make setup      install missing Debian packages (as root) or print the command
#   make demo       set up, build, look at this machine, a small speed table
#   make test       what CI runs: native tests, the other architecture under qemu-user, Python tests
#   make test-all   the full matrix, then ASan + UBSan and TSan builds, clang-tidy
#                   STAGE=cross,python runs those stages of either alone
#   make kernels    GPU kernels anew, for builds without nvcc: src/cuda/kernels.tar.xz; needs nvcc
#   make format     clang-format over every C++ file that git knows
#   make fuzz       every libFuzzer target for FUZZ_SECONDS (60) each; needs clang
#   make bench      the speed tables of docs/benchmarks.md, a few minutes
#   make soak       the demo server under mixed clients for SOAK_SECONDS (600): memory, latency, wrong replies
#   make install    the program, man page, completions, demo, and what embeds the engine (docs/embed.md) under PREFIX
#                   (/usr/local); DESTDIR is respected
#   make package    a .deb and a .tar.gz in $(BUILD)
#   make wheel      a wheel of kt-kernel (the Python package and the program) in dist/; make sdist: its sources
#   make clean

BUILD ?= build
PREFIX ?= /usr/local
CMAKE_FLAGS ?=
ISAS ?= all
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600
STAGE ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
KT = $(BUILD)/bin/kt
STAGES = $(if $(STAGE),--stage $(STAGE))
FRESH = $(if $(wildcard $(BUILD)/CMakeCache.txt),,yes)
GENERATOR = $(if $(FRESH),$(if $(shell command -v ninja),-G Ninja))
DEMO_ISAS = $(if $(filter file,$(origin ISAS)),$(if $(FRESH),native),$(ISAS))
CONFIGURE = cmake -S . -B $(BUILD) $(GENERATOR) $(CCACHE) $(if $(ISAS),-DKT_ISAS=$(ISAS)) $(CMAKE_FLAGS)
# A folder that was configured keeps its way to compile.
CCACHE = $(if $(FRESH),$(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache))

.PHONY: all kernels build setup setup-tests demo test test-all format fuzz bench soak install package wheel sdist \
  program clean

all: build

build:
	@$(CONFIGURE)
	@cmake --build $(BUILD) -j $(JOBS)

# What is installed, without compiling the tests.
program:
	@$(CONFIGURE)
	@cmake --build $(BUILD) -j $(JOBS) --target kt_documents

install: program
	@cmake --install $(BUILD) --prefix $(abspath $(PREFIX))

package: program
	@cd $(BUILD) && cpack

wheel:
	@JOBS=$(JOBS) scripts/wheel.sh

sdist:
	@scripts/wheel.sh --sdist

setup:
	@scripts/setup.sh

setup-tests:
	@scripts/setup.sh --tests

# In a fresh folder, what gets there soonest: the best instruction set of this CPU alone, and rooms compiled as one also
# where there is a compiler cache.
demo: setup
	@$(MAKE) --no-print-directory program ISAS=$(DEMO_ISAS) CMAKE_FLAGS="$(if $(FRESH),-DKT_UNITY=ON) $(CMAKE_FLAGS)"
	@BUILD=$(BUILD) scripts/demo.sh

test: setup-tests
	@BUILD=$(BUILD) JOBS=$(JOBS) scripts/test.sh $(STAGES)

test-all: setup-tests
	@BUILD=$(BUILD) JOBS=$(JOBS) scripts/test.sh --all $(STAGES)

kernels:
	@scripts/kernels.sh

format:
	@JOBS=$(JOBS) scripts/format.sh

fuzz:
	@FUZZ_SECONDS=$(FUZZ_SECONDS) JOBS=$(JOBS) scripts/fuzz.sh

bench: build
	@BUILD=$(BUILD) bench/tables.sh

soak: build
	@KT_PROGRAM=$(KT) python3 tools/soak.py --seconds $(SOAK_SECONDS) --json $(BUILD)/soak.json

clean:
	rm -rf $(BUILD) build-cross build-asan build-tsan build-tidy build-fuzz build-wheel*
