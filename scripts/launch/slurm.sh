#!/usr/bin/env bash
# One process a node with all its GPUs; JAX finds the other processes through SLURM's variables.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh --config=configs/flash_base.py --workdir=/shared/runs/x \
#       --config.mesh.shape=4,8,1
#
# The working directory is the repository, on a disk that all nodes share, after `make setup`; so are the workdir and
# --config.data.cache_dir. Two minutes before its time is over the run is told to save and end; submitted again, it goes
# on from there. When a node fails the job is requeued, and goes on from the newest checkpoint.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# Else JAX would give each task one GPU.
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
    export JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
fi
exec srun --kill-on-bad-exit=1 .venv/bin/python -m flash_lm.train --hosts=auto "$@"
