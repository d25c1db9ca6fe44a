#!/usr/bin/env bash
# {{ name }}: one run over {{ nodes }} GPU node(s), one task each.
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ devices }}
#SBATCH --time={{ hours }}:00:00
# Two minutes before the end each task gets SIGTERM, saves, and exits with 42.
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Appended to, so that a requeued job keeps its earlier lines.
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit this file with sbatch, from the clone}"
source .venv/bin/activate  # python3 -m venv .venv; pip install -e '.[cuda,data]'
export JAX_COMPILATION_CACHE_DIR={{ cache | q }}

# By default, jax gives a Slurm task one GPU, that of its local rank. Here a
# task uses all GPUs of its node.
export JAX_LOCAL_DEVICE_IDS
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((${SLURM_GPUS_ON_NODE:-{{ devices }}} - 1)))

# jax reads address, rank and size from Slurm. --kill-on-bad-exit=0 lets
# tasks that are stopping finish their common save.
for failures in $(seq 0 {{ retries }}); do
  code=0
  srun --kill-on-bad-exit=0 python -m launch.train --distributed \
    {{ train }} || code=$?
  case $code in
    42)
      echo 'preempted and saved; back into the queue'
      scontrol requeue "$SLURM_JOB_ID"
      exit 42 ;;
    0 | 2 | 3 | 4 | 5) exit "$code" ;;  # done; or a person has to look
  esac
  echo "failed with $code, $failures time(s) before; at most {{ retries }} more"
  sleep 10
done
exit "$code"
