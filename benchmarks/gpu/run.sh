#!/usr/bin/env bash
# Runs the benchmarks on one GPU, meant to take 10 minutes: benchmarks/gpu/run.sh [folder, default benchmarks/gpu/results]
#
# Needs jax, flax, optax and ml_collections; plots need matplotlib, and the peers need PyTorch. The kernels are checked
# first: those that differ from the form that XLA compiles end the run. Nearly all the time is compilation, which
# JAX_COMPILATION_CACHE_DIR keeps for a second run. The script reports what it skips for lack of time. PYTHON chooses the
# interpreter. Results of an earlier run in the folder are replaced.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:-benchmarks/gpu/results}
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
step() { "$PYTHON" -m "benchmarks.$1" "${@:2}"; echo "after $SECONDS s: $1 done"; }

"$PYTHON" -c 'import jax, sys
if jax.default_backend() != "gpu": sys.exit(f"error: no GPU, jax runs on a {jax.default_backend()}: run make setup DEVICE=cuda")'
rm -rf "$OUT/kernels" "$OUT/step_time" "$OUT/step_time_all" "$OUT/decode" "$OUT/peers"

KERNELS="flash flash_quad linear_transformer mamba2"
step kernels --families="$KERNELS" --lengths="2048 8192" --rounds=1 --out="$OUT/kernels"

# Each family stands next to the forms it is compared with. With ALL=1 also the other families, without a time limit.
MAIN="transformer_plus_plus transformer_plus_plus+quadratic.implementation=cudnn flash_quad flash linear_transformer"
MAIN="$MAIN flash_quad+kernels=xla flash+kernels=xla mamba2"
REST=$("$PYTHON" -c 'import sys
from flash_lm.families.family import families_with_form
print(*[name for name in families_with_form(causal=True) if name not in sys.argv[1:]])' $MAIN)
step steps.step_time --size=base --dtype=bfloat16 --tokens_per_step=65536 --lengths="8192 2048 512 16384" \
    --families="$MAIN" --config.model.remat=none --rounds=1 --seconds=$((SECONDS < 390 ? 450 - SECONDS : 60)) \
    --out="$OUT/step_time"
if [[ ${ALL:-} ]]; then
    step steps.step_time --size=base --dtype=bfloat16 --tokens_per_step=65536 --lengths="2048 8192" \
        --families="transformer_plus_plus $REST" --config.model.remat=none --rounds=1 --out="$OUT/step_time_all"
fi

step decoding.token_time --config=configs/flash_base.py --families="transformer_plus_plus flash linear_transformer" \
    --contexts="1024 16384" --batches="16" --rounds=1 --config.model.vocab_size=32000 --out="$OUT/decode"

if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    echo "peers skipped: PyTorch is not installed"
elif ((SECONDS > 500)); then
    echo "peers skipped: no time left; run benchmarks.peers.speed to measure them separately"
else
    # Both processes need memory on the device.
    XLA_PYTHON_CLIENT_PREALLOCATE=false step peers.speed --config=configs/flash_base.py --python="$(command -v "$PYTHON")" \
        --peers="sdpa flash_linear_attention" --lengths="2048 8192" --tokens_per_step=65536 --dtype=bfloat16 --rounds=1 \
        --out="$OUT/peers"
fi
