#!/usr/bin/env bash
# One process a node with all its GPUs; JAX finds the other processes through SLURM's variables.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh --config=configs/flash_base.py --workdir=/shared/runs/x \
#       --config.mesh.shape=4,8,1
#
# A first word without dashes names another command than train, such as evaluate.
#
# Start it in the repository, after `make setup DEVICE=cuda`. The repository, the workdir and
# --config.data.cache_dir lie on a disk that all nodes share. Two minutes before the job's time is over, the run saves and
# ends with exit code 75; submit it again to continue. When a node fails, the job is queued again and continues from the newest checkpoint.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# Else JAX would give each task one GPU.
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
    export JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
fi
command=train
case "${1:-}" in --* | "") ;; *) command=$1 && shift ;; esac
exec srun --kill-on-bad-exit=1 .venv/bin/python -m "flash_lm.$command" --hosts=auto "$@"
