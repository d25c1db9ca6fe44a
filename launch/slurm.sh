#!/usr/bin/env bash
# One run over GPU nodes, one task per node; a requeued job resumes by itself.
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/NAME.py --workdir=DIR
#
# Submit from the clone; DIR has to be on a file system that all nodes share.
#SBATCH --job-name=jaxpost
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
# Two minutes before the end each task gets SIGTERM, saves, and exits with 42.
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Appended to, so that a requeued job keeps its earlier lines.
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit this file with sbatch}"
source .venv/bin/activate  # python3 -m venv .venv; pip install -e '.[cuda]'

# jax gives a Slurm task one GPU, the one of its local rank, unless told
# otherwise. (One task per GPU instead: --ntasks-per-node=8, without this.)
export JAX_LOCAL_DEVICE_IDS
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((${SLURM_GPUS_ON_NODE:-8} - 1)))

# jax reads address, rank and size from Slurm. --kill-on-bad-exit=0 lets the
# tasks that were told to stop finish the save they make together.
code=0
srun --kill-on-bad-exit=0 python -m launch.train --distributed "$@" || code=$?

if [ "$code" -eq 42 ]; then
  echo 'preempted and saved; back into the queue'
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
