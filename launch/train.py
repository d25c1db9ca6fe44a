"""Starts or resumes a run.

  python -m launch.train --config=configs/quickstart.py --workdir=runs/first

Change any field with --config.a.b=value. The same command resumes. The last
line printed is the object in WORKDIR/summary.json. On several hosts run the
same command on each, with --distributed where a cluster is not detected.
"""

import json
import logging

from absl import flags
from ml_collections import config_flags

from jaxpost import host

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file, FILE.py[:args].', lock_config=True)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run: new, or one to resume.')
_DISTRIBUTED = flags.DEFINE_bool(
    'distributed', False, 'Call jax.distributed.initialize() first.')
flags.mark_flags_as_required(['config', 'workdir'])


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  import jax
  from jaxpost import stages
  if _DISTRIBUTED.value:
    jax.distributed.initialize()
  summary = stages.run(_CONFIG.value, _WORKDIR.value)
  if jax.process_index() == 0:
    print(json.dumps(summary))


if __name__ == '__main__':
  from . import exits
  exits.run(main)
