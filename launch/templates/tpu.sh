#!/usr/bin/env bash
# {{ name }}: one run on every host of the TPU slice {{ tpu }}. From here it
# needs gcloud only; each host installs the clone and repeats the command.
set -euo pipefail

everywhere() {
  gcloud compute tpus tpu-vm ssh {{ tpu | q }} --zone={{ zone | q }} \
    --worker=all --command="$1"
}

# jax 0.10.2 is the last for Python 3.11; any of 3.11 to 3.13 will do.
everywhere '
  set -e
  [ -d jaxpost ] || git clone {{ repo | q }} jaxpost
  cd jaxpost
  git fetch --quiet origin
  git checkout --quiet --detach {{ revision | q }}
  [ -x .venv/bin/pip ] || python3 -m venv .venv
  .venv/bin/pip install --quiet -e ".[tpu,data]"
'

# jax finds its peers by itself on a slice. A failure on one host ends all of
# them, and all restart from the last checkpoint.
everywhere '
  cd jaxpost
  export JAX_COMPILATION_CACHE_DIR={{ cache | q }}
  failures=0
  while true; do
    code=0
    .venv/bin/python -m launch.train --distributed {{ train }} || code=$?
    case $code in
      42) echo "preempted and saved; going on" >&2 ;;
      0 | 2 | 3 | 4 | 5) exit $code ;;  # done; or a person has to look
      *) failures=$((failures + 1))
        [ $failures -le {{ retries }} ] || exit $code
        echo "failed with $code; again, $failures of {{ retries }}" >&2 ;;
    esac
    sleep 10
  done
'
