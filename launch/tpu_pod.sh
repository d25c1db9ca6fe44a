#!/usr/bin/env bash
# One run on every host of a TPU slice, restarted after each preemption.
#
#   TPU=my-v5p-64 ZONE=us-east5-a REPO=https://host/you/jaxpost.git \
#     launch/tpu_pod.sh --config=configs/NAME.py --workdir=gs://BUCKET/RUN
#
# Needs gcloud and a slice that is up. --workdir has to be a bucket: all hosts
# write there, and a new host resumes from it.
set -euo pipefail

: "${TPU:?name of the slice}" "${ZONE:?its zone}" "${REPO:?git address}"
flags=$(printf '%q ' "$@")

everywhere() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
    --command="$1"
}

# jax 0.10.2 is the last for Python 3.11; any of 3.11 to 3.13 will do.
everywhere "
  set -e
  [ -d jaxpost ] || git clone --depth=1 $(printf %q "$REPO") jaxpost
  cd jaxpost
  [ -x .venv/bin/pip ] || python3 -m venv .venv
  .venv/bin/pip install --quiet -e '.[tpu]'
"

# jax finds its peers by itself on a TPU slice. 42: preempted and saved. gcloud
# gives the exit status of a worker's command; each worker repeats its own, so
# that no status is lost on the way here.
everywhere "
  cd jaxpost
  while true; do
    .venv/bin/python -m launch.train --distributed $flags && exit 0
    code=\$?
    [ \$code -eq 42 ] || exit \$code
    echo 'preempted and saved; continuing' >&2
    sleep 10
  done
"
