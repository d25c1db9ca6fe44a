"""Kills the reward workers when the process that owns them is gone.

Run as a script by the pool. Reads '+pid' and '-pid' lines for the process
groups that live; the end of the pipe, which even kill -9 brings, is the sign.
"""

import os
import signal
import sys


def main():
  groups = set()
  for line in sys.stdin:
    change = groups.add if line[0] == '+' else groups.discard
    change(int(line[1:]))
  for group in groups:
    kill_group(group)


def kill_group(group):
  try:
    os.killpg(group, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass  # nobody left in it; macOS says so by the second


if __name__ == '__main__':
  main()
