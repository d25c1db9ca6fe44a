"""Kills worker processes after the process that owns them has ended.

`process.Reaper` runs this file as a script. Its stdin carries one line for each change: '+PID' when the process group
PID starts, '-PID' when it has ended. The operating system closes the pipe when the owner ends, even after kill -9; the
script then kills the groups that have not ended.
"""

import os
import signal
import sys


def main() -> None:
  """Tracks the process groups on stdin; at its end, kills those that have not ended."""
  groups: set[int] = set()
  for line in sys.stdin:
    change = groups.add if line[0] == '+' else groups.discard
    change(int(line[1:]))
  for group in groups:
    kill_group(group)


def kill_group(group: int) -> None:
  """Sends SIGKILL to a process group, if it still exists."""
  try:
    os.killpg(group, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass  # The group is empty; macOS raises PermissionError then.


if __name__ == '__main__':
  main()
