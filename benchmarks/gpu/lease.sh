#!/bin/sh
# sh benchmarks/gpu/lease.sh PACK OUTPUT SECONDS [options of benchmarks.gpu]
# On a machine without a network: unpack what `benchmarks.gpu.pack` made, start the comparison as a process that outlives
# this command, follow it until SECONDS after this command began, and copy its files to OUTPUT. Run it again to follow or
# to continue it.
# Everything lies in $LEASE, /tmp/lease by default; PYTHON names the interpreter.
set -eu
began=$(date +%s) pack=$(cd "$1" && pwd) output=$2 seconds=${3%.*}
shift 3
cd "$(dirname "$0")/../.."
lease=${LEASE:-/tmp/lease} python=${PYTHON:-python3}
results=$lease/results
"$python" benchmarks/gpu/unpack.py "$pack" "$lease"
export PYTHONUNBUFFERED=1 PYTHONPATH="$lease/site:$PWD" TVM_FFI_CACHE_DIR="$lease/jit" TRITON_CACHE_DIR="$lease/triton"
export NUMBA_CACHE_DIR="$lease/numba" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$results"
pid=$(cat "$results/pid" 2>/dev/null || echo none)
state=$(sed 's/.*) //' "/proc/${pid:-none}/stat" 2>/dev/null | cut -c 1)
if [ -z "$state" ] || [ "$state" = Z ]; then
    setsid "$python" -m benchmarks.gpu "$lease/work" --output "$results" "$@" </dev/null >>"$results/comparison.log" 2>&1 &
    echo $! >"$results/pid"
fi
"$python" -m benchmarks.gpu --follow --output "$results" --for $((seconds + began - $(date +%s))) --copy-to "$output"
tail -n 20 "$results/comparison.log"
