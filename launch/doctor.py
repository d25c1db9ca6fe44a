"""Shows what this machine has for a run, and what to fix.

  python -m launch.doctor
  python -m launch.doctor --workdir=/mnt/runs
  python -m launch.doctor --distributed     # on each host

Versions, devices and their memory, the attention kernel checked against XLA's attention, memory of
the host, disks, limits; of several hosts also whether they are equal, and the network between them.
Lines that begin with `fix` say what to do. Ends with 2 if there are any.
"""

import logging
import sys

from absl import flags

from . import cluster_flags

cluster_flags.define()
_WORKDIR = flags.DEFINE_string('workdir', 'runs', 'Folder in which runs are to be written.')


def main(argv):
  """Prints the findings."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  cluster_flags.connect()
  from jaxpost.tools import doctor

  findings = doctor.examine(_WORKDIR.value)
  for finding in findings:
    print(f'{"fix" if finding.fix else "ok ":4}{finding.what}: {finding.found}')
    if finding.fix:
      print(f'      {finding.fix}')
  sys.exit(2 if any(finding.fix for finding in findings) else 0)


if __name__ == '__main__':
  from . import exits

  exits.run(main)
