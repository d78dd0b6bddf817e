#!/usr/bin/env bash
# One process a node with all its GPUs; they find each other through SLURM's variables.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh --config=configs/flash_base.py --workdir=/shared/runs/x \
#       --config.mesh.shape=4,8,1
#
# A first word without dashes names another command than train, such as evaluate.
#
# Start it in the repository, after `make setup DEVICE=cuda`. The repository lies on a disk that all nodes share; so do the
# workdir and --config.data.cache_dir, or they lie in a bucket. When a process dies, all are started again in the same job;
# when a node fails, SLURM queues the job again. Both continue from the newest checkpoint. Two minutes before the job's time is
# over, the run saves and ends with exit code 75; submit it again to continue.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
command=train
case "${1:-}" in --* | "") ;; *) command=$1 && shift ;; esac
# The launcher gets the signal of SLURM, and hands it on to srun, which hands it on to all processes.
exec .venv/bin/python -m flash_lm.launch srun --kill-on-bad-exit=1 .venv/bin/python -m "flash_lm.$command" "$@"
