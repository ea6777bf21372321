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

# Ten minutes for all. What fails or takes too long does not keep the rest from running.
failed=0

# The root conftest serves tests with engines and stores, which need more packages than these do.
timeout 300 "$python" -m pytest --confcutdir=tests/gpu -q --maxfail=40 -W default -m gpu tests/gpu \
    --junitxml="$out/tests.xml" 2>&1 | tee "$out/tests.txt" || failed=$?

bench() { # FILE SECONDS ARGUMENTS...
    timeout --kill-after=5 --signal=INT "$2" "$python" -m tests.bench "${@:3}" --json \
        >"$out/$1" || { failed=$?; return; }
    "$python" - "$out/$1" <<'PY'
import json, sys
for row in json.load(open(sys.argv[1]))["results"]:
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if v is not None})
PY
}
bench bench.json 170 gpu
exit "$failed"
