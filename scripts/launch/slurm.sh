#!/usr/bin/env bash
# One process a node with all its GPUs; JAX finds the other processes through SLURM's variables.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh --config=configs/flash_base.py --workdir=/shared/runs/x \
#       --config.mesh.shape=4,8,1
#
# The working directory is the repository, on a disk that all nodes share, after `make setup`; so are the workdir and
# --config.data.cache_dir. SLURM's SIGTERM makes the run save and end; --requeue then goes on from there.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
exec srun --kill-on-bad-exit=1 .venv/bin/python -m flash_lm.train --hosts=auto "$@"
