"""Writes the report of a run, which a run writes itself when it has finished.

  python -m launch.report --run=runs/quickstart

For a run that is in progress, was stopped or has failed. Writes report.html into the folder of the run, from its
metrics and samples, and prints its path. Uses no device.
"""

from absl import flags

_RUN = flags.DEFINE_string('run', None, 'Folder of a run, finished or not.')
flags.mark_flags_as_required(['run'])


def main(argv):
  """Writes the page."""
  del argv
  from etils import epath

  from jaxpost.errors import InputError
  from jaxpost.monitor import report
  from jaxpost.monitor.metrics import read_rows

  run = epath.Path(_RUN.value).expanduser()
  rows = read_rows(run / 'metrics.jsonl')
  if not rows:
    raise InputError(f'--run={_RUN.value}: has no rows in metrics.jsonl; name the folder of a run that has made a step')
  print(report.write_report(run, rows))


if __name__ == '__main__':
  from . import exits

  exits.run(main)
