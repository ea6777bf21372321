#!/usr/bin/env bash
# All that only a GPU can show, on a machine with PyTorch and cupy: tests, then figures as JSON.
# Usage: bash tests/gpu/run.sh RESULTS_FOLDER
set -euo pipefail
out=${1:?expected a folder for the results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

{
    nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max \
        --format=csv
    "$python" -c 'import cupy, numpy, torch; print("cupy", cupy.__version__, "numpy",
        numpy.__version__, "torch", torch.__version__, "CUDA", torch.version.cuda)'
    lscpu | grep -E "Model name|^CPU\(s\)|NUMA"
} | tee "$out/machine.txt"

# The root conftest serves tests with engines and stores, which need more packages than these do.
tests=0
timeout 280 "$python" -m pytest --confcutdir=tests/gpu -q --maxfail=20 -W default -m gpu tests/gpu \
    --junitxml="$out/tests.xml" 2>&1 | tee "$out/tests.txt" || tests=$?
timeout 280 "$python" -m kvstore.cli bench gpu --json >"$out/bench.json"
"$python" - "$out/bench.json" <<'PY'
import json, sys
for row in json.load(open(sys.argv[1]))["results"]:
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if v is not None})
PY
exit "$tests"
