"""Starts or resumes a run.

  python -m launch.train --config=configs/quickstart.py --workdir=runs/first

Any field of the config can be changed with --config.a.b=value. The same command resumes the run. Where the output is no
terminal, the last line printed is the content of WORKDIR/summary.json as JSON. On several hosts, run the same command
on each with --distributed; `launch.local` starts several processes on this machine.
"""

import json
import logging
import sys

from absl import flags

from jaxpost.hardware import host, signals
from jaxpost.monitor import activity

from . import config_flag, exits

_CONFIG = config_flag.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run: a new one, or one to resume.')
_VERBOSE = flags.DEFINE_bool('verbose', False, 'Print the table of compiled programs.')
exits.define_cluster_flags()
flags.mark_flags_as_required(['config', 'workdir'])


def main(argv):
  """Trains, and prints the summary on process 0."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  with signals.StopSignal(exit_after_s=5.0) as stop:
    host.tune_host()
    host.use_compile_cache()
    with activity.Activity(activity.Console(quiet=bool(flags.FLAGS.process_id))).following(lambda: 'starting'):
      import jaxpost
      from jaxpost import stages
      from jaxpost.distributed import coordination

      exits.connect()
    summary = stages.run(
      _CONFIG.value, _WORKDIR.value, choose_mesh=jaxpost.choose_mesh, stop=stop, verbose=_VERBOSE.value
    )
    if coordination.process_index() == 0 and not sys.stdout.isatty():
      print(json.dumps(summary))


if __name__ == '__main__':
  exits.run(main)
