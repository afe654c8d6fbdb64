# Every command of developers and CI. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MATURIN := VIRTUAL_ENV="$(abspath $(VENV))" $(VENV)/bin/maturin
MODEL := smollm2-135m-instruct
PROFILE ?= checked
PYTEST_ARGS ?=
# Each test file runs as a whole in one of two processes: torch runs on one thread in the tests.
PYTEST_WORKERS ?= -n 2 --dist loadfile
DEMO_ARGS ?=
MUTANTS ?=
BENCH_ARGS ?=
PEERS ?=
# The oldest glibc that the wheel of `make dist` runs on; zig links against it whatever is installed.
MANYLINUX ?= manylinux_2_28
PYTHON_SOURCES := python tests benches kernels scripts

# Loom's own build: another cfg means other artefacts. Link-time optimisation buys it nothing.
LOOM := RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom CARGO_PROFILE_RELEASE_LTO=off \
	CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 cargo test --locked -p cbrs-core --test loom --release

# Tests of the Triton kernels that need nothing of ours but Python: beside the build, which leaves a core idle.
KERNEL_TESTS := tests/test_kernel_compile.py tests/test_launch_table.py tests/test_interpreted_attention.py

# The Rust benchmarks are a workspace of their own.
BENCHES := --manifest-path benches/Cargo.toml
IN_BENCHES := CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-$(abspath target/benches)}"

# Everything but the wheel is built with the profile `checked`, so that one build of the dependencies
# serves the extension, the Rust tests, the lints and the documentation.

# The stages of `make test` run after its set-up and build, and need not look at them again.
ifndef CBRS_STAGED
NEED_SETUP := setup
NEED_BUILD := build
NEED_FMT := fmt-check
endif

.PHONY: help
help: ## list all commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | \
		while IFS=$$'\t' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

.PHONY: all
all: fmt build test ## format, build and check everything

.PHONY: demo
demo: wheel ## run the same requests under static and continuous batching, and draw both (DEMO_ARGS=...)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/cbrs-*.whl
	@$(VENV)/bin/cbrs pull $(MODEL)
	@$(VENV)/bin/cbrs demo $(DEMO_ARGS)

.PHONY: test
test: ## set up, then run every check (25 minutes at most on 2 cores; CI adds wheel-smoke and bench-guard)
	@CBRS_STAGED=1 scripts/stages.sh setup+test-loom build+test-kernels model fmt-check lint test-package+test-rust test-py

.PHONY: soak
soak: $(NEED_BUILD) model ## run the long versions of the tests (hours)
	CBRS_RANDOM_OPS=100000000 CBRS_SOAK=1 cargo test --locked --profile checked
	cargo test --locked --profile checked -p cbrs-server --test key_timing -- --ignored
	CBRS_SOAK=1 LOOM_MAX_PREEMPTIONS=4 LOOM_MAX_DURATION=120 $(LOOM)
	CBRS_SOAK=1 $(PY) -m pytest $(PYTEST_WORKERS) -m soak --timeout 0 $(PYTEST_ARGS)

.PHONY: setup
setup: ## check the prerequisites and make .venv (PYTHON=python3.12 names the interpreter)
	@scripts/setup.sh "$(PYTHON)" $(VENV)

.PHONY: build
build: $(NEED_SETUP) ## install cbrs into .venv, editable (PROFILE=dev, checked or release)
	$(MATURIN) develop --locked --profile $(PROFILE)

.PHONY: model
model: $(NEED_BUILD) ## fetch the small model into the cache, once
	$(VENV)/bin/cbrs pull $(MODEL)

.PHONY: fmt
fmt: $(NEED_SETUP) ## format all sources in place
	cargo fmt --all
	cargo fmt --all $(BENCHES)
	$(PY) -m ruff check --fix $(PYTHON_SOURCES)
	$(PY) -m ruff format $(PYTHON_SOURCES)

.PHONY: fmt-check
fmt-check: $(NEED_SETUP) ## fail if a source is not formatted
	cargo fmt --all --check
	cargo fmt --all $(BENCHES) --check
	$(PY) -m ruff format --check $(PYTHON_SOURCES)

.PHONY: lint
lint: $(NEED_FMT) $(NEED_BUILD) stubtest docs ## clippy, rustdoc, ruff, mypy, stubtest
	cargo clippy --locked --workspace --all-targets --profile checked -- -D warnings
	$(IN_BENCHES) cargo clippy --locked $(BENCHES) --all-targets -- -D warnings
	$(PY) -m ruff check $(PYTHON_SOURCES)
	$(PY) -m mypy

.PHONY: stubtest
stubtest: $(NEED_BUILD) ## hold _core.pyi against the built module
	$(PY) -m mypy.stubtest cbrs._core --ignore-unused-allowlist $(if $(wildcard .mypy-stubtest-allowlist),--allowlist .mypy-stubtest-allowlist)

.PHONY: test-rust
test-rust: ## Rust tests, the random test against the reference included, and the examples
	cargo test --locked --profile checked --no-fail-fast
	for example in $(basename $(notdir $(wildcard rust/core/examples/*.rs))); do \
		cargo run --locked --profile checked -p cbrs-core --example "$$example"; done

.PHONY: test-loom
test-loom: ## model-check the queue: the small models exhaustively, the larger ones with a bound
	$(LOOM)

.PHONY: test-py
test-py: $(NEED_BUILD) $(if $(NEED_BUILD),model) ## Python tests (PYTEST_ARGS=...)
	$(PY) -m pytest $(PYTEST_WORKERS) --ignore tests/test_packaging.py $(if $(CBRS_STAGED),$(KERNEL_TESTS:%=--ignore %)) $(PYTEST_ARGS)

.PHONY: test-kernels
test-kernels: $(NEED_SETUP) ## compile the Triton kernels for their GPUs, and run attention's under the interpreter
	PYTHONPATH=python OMP_NUM_THREADS=1 $(PY) -m pytest $(KERNEL_TESTS) $(PYTEST_ARGS)

.PHONY: test-package
test-package: $(NEED_BUILD) ## install a wheel of what is built, and the sdist, into fresh environments and use them
	@rm -rf target/packages
	$(MATURIN) build --locked --profile $(PROFILE) --out target/packages
	$(MATURIN) sdist --out target/packages
	CBRS_DIST=target/packages $(PY) -m pytest tests/test_packaging.py $(PYTEST_ARGS)

.PHONY: wheel
wheel: $(NEED_SETUP) ## build the release wheel into dist/
	@rm -f dist/cbrs-*.whl
	$(MATURIN) build --locked --release --out dist

.PHONY: sdist
sdist: $(NEED_SETUP) ## build the source distribution into dist/
	@rm -f dist/cbrs-*.tar.gz
	$(MATURIN) sdist --out dist

.PHONY: wheel-smoke
wheel-smoke: wheel sdist ## the same as test-package for the release wheel
	CBRS_DIST=dist CBRS_RELEASE=1 $(PY) -m pytest tests/test_packaging.py $(PYTEST_ARGS)

.PHONY: dist
dist: $(NEED_SETUP) ## build the release files into dist/, sdist and manylinux wheel, and verify both
	@rm -f dist/cbrs-*
	$(PY) scripts/requirements.py dist >$(VENV)/requirements-dist.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements-dist.txt
	PATH="$(abspath $(VENV))/bin:$$PATH" $(MATURIN) build --locked --release --zig --compatibility $(MANYLINUX) --out dist
	$(MATURIN) sdist --out dist
	CBRS_DIST=dist CBRS_RELEASE=1 CBRS_MANYLINUX=$(MANYLINUX) $(PY) -m pytest tests/test_packaging.py $(PYTEST_ARGS)
	@sha256sum dist/cbrs-*

# No program of its own, and one that needs other engines and minutes.
# The first is no bench, the others need other engines, or a folder to write to.
NOT_IN_BENCH := benches/hardware.py benches/compare_schedulers.py benches/compare_serving.py \
	benches/make_checkpoint.py

.PHONY: bench
bench: $(NEED_BUILD) ## run the benchmarks; each prints one JSON line last (PROFILE=release for figures)
	@for bench in $(filter-out $(NOT_IN_BENCH),$(wildcard benches/*.py)); do echo "=== $$bench"; $(PY) "$$bench"; done

.PHONY: compare
compare: $(NEED_BUILD) ## run other engines' schedulers beside ours (PEERS="--peer-python vllm=...", PROFILE=release)
	$(PY) benches/compare_schedulers.py --plot docs/schedulers.png $(PEERS)

.PHONY: bench-rust
bench-rust: ## run the Rust benchmarks of the core, without Python (BENCH_ARGS="--bench queue")
	$(IN_BENCHES) cargo bench --locked $(BENCHES) $(BENCH_ARGS)

.PHONY: bench-guard
bench-guard: ## count the instructions of a step (valgrind); above a ceiling is an error
	@$(PYTHON) benches/guard/run.py

.PHONY: mutants
mutants: $(NEED_SETUP) ## plant each known fault in turn; one that no test notices is an error (MUTANTS="id ...")
	$(PY) scripts/mutants.py $(MUTANTS)

.PHONY: docs
docs: ## build the API documentation of the Rust crates into target/doc/
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --profile checked

.PHONY: clean
clean: ## remove everything that was built, .venv too
	rm -rf target dist cbrs-demo $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python kernels tests benches scripts \( -name __pycache__ -o -name '_core*.so' \) -prune -exec rm -rf {} +
