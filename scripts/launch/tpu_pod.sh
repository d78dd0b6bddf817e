#!/usr/bin/env bash
# Every host of a TPU pod slice runs the same command, and finds the others through the slice's metadata.
#
#   TPU=my-slice ZONE=us-east5-b scripts/launch/tpu_pod.sh --config=configs/flash_base.py \
#       --workdir=gs://my-bucket/runs/x --config.data.cache_dir=gs://my-bucket/cache --config.mesh.shape=-1,1,1
#
# A first word without dashes names another command than train, such as evaluate.
#
# Start it in the repository, on a machine with its environment, after `gcloud auth login`. Before: on every host the
# repository at ~/flash_lm, with `make setup DEVICE=tpu`; workdir and cache in a bucket, or on a disk that all hosts share. When a
# host dies the others end within a minute, and all are started again, RESTARTS times in a row at most; where this machine
# can read the workdir, a new checkpoint begins the count again.
set -euo pipefail
: "${TPU:?name of the slice}" "${ZONE:?its zone}"
command=train
case "${1:-}" in --* | "") ;; *) command=$1 && shift ;; esac
words=$(printf '%q ' "$@")
exec .venv/bin/python -m flash_lm.launch --restarts="${RESTARTS:-20}" \
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
    --command="cd flash_lm && .venv/bin/python -m flash_lm.$command $words"
