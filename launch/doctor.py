"""Shows what this machine has for a run, and what to fix.

  python -m launch.doctor
  python -m launch.doctor --workdir=/mnt/runs
  python -m launch.doctor --distributed     # on each host

It shows versions, devices and their memory, a check of the attention kernel against XLA's attention,
memory of the host, disks and limits; for several hosts also whether they are equal, and the network
between them. Lines that begin with `fix` say what to do; with any of them the exit code is 2.
"""

import logging
import sys

from absl import flags

from . import exits

exits.define_cluster_flags()
_WORKDIR = flags.DEFINE_string('workdir', 'runs', 'Folder in which runs are to be written.')


def main(argv):
  """Prints the findings."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  exits.connect()
  from jaxpost.tools import doctor

  findings = doctor.examine(_WORKDIR.value)
  for finding in findings:
    print(f'{"fix" if finding.fix else "ok ":4}{finding.what}: {finding.found}')
    if finding.fix:
      print(f'      {finding.fix}')
  sys.exit(2 if any(finding.fix for finding in findings) else 0)


if __name__ == '__main__':
  exits.run(main)
