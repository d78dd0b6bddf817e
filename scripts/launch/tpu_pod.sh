#!/usr/bin/env bash
# Every host of a TPU pod slice runs the same command; JAX finds the others through the slice's metadata.
#
#   TPU=my-slice ZONE=us-east5-b scripts/launch/tpu_pod.sh --config=configs/flash_base.py \
#       --workdir=/mnt/shared/runs/x --config.mesh.shape=-1,1,1
#
# The repository lies at ~/flash_lm on every host, with an environment that has jax[tpu]; the workdir and
# --config.data.cache_dir are on a disk that all hosts share.
set -euo pipefail
: "${TPU:?name of the slice}" "${ZONE:?its zone}"
words=$(printf '%q ' "$@")
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
    --command="cd flash_lm && .venv/bin/python -m flash_lm.train --hosts=auto $words"
