"""The process that measures: `worker.py OPTIONS ROW...`, started by `supervisor.py`.

Writes to a pipe {"begin": row} before each row and its line after it. After an exception or a timeout, which is the
error of the row, the next row runs.
"""

import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from typing import Any

from jaxpost import errors
from jaxpost.hardware import host
from jaxpost.monitor import metrics
from jaxpost.tools.accelerator import rows as rows_lib

# After these errors a device does not work any more: the process ends, and the supervisor starts another.
_FATAL = ('CUDA_ERROR_ILLEGAL_ADDRESS', 'CUDA_ERROR_LAUNCH_FAILED', 'CUDA_ERROR_ASSERT', 'device-side assert')

_MARGIN = 5.0  # seconds before the end of the budget, for the row to report its results so far, or its error

# Errors of measurements, of JAX (JaxRuntimeError is a RuntimeError) and of time limits. Any other error ends the
# process, and is the row's error as well.
_FAILURES: tuple[type[Exception], ...]
_FAILURES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError)
_FAILURES += (RuntimeError, TypeError, ValueError, errors.InputError)


def measure(name: str, row: rows_lib.Row, tiny: bool, left: float = math.inf) -> dict[str, Any]:
  """Returns the line of a row: its figures, or its error.

  The row is stopped after `row.seconds`, or after `left` seconds, which remain of the budget.
  """
  start, seconds = time.perf_counter(), max(0.1, min(row.seconds, left))

  def give_up(number: int, frame: Any) -> None:
    del number, frame
    raise TimeoutError(f'gave no result in {seconds:.0f} s')

  signal.signal(signal.SIGALRM, give_up)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    figures = row.run(tiny)
  except _FAILURES as e:
    traceback.print_exc()
    figures = dict(error=f'{type(e).__name__}: {e}'[:2000])
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
  line = dict(row=name, seconds=round(time.perf_counter() - start, 1), **({'tiny': True} if tiny else {}), **figures)
  return metrics.plain(line)


def main(argv: list[str]) -> None:
  """Measures the rows that the command line names.

  The first argument is JSON: the file descriptor `pipe`, `tiny`, `traces` (a folder or ''), and `end`, the time of
  `time.monotonic` at which to stop.
  """
  options, *names = json.loads(argv[0]), *argv[1:]
  host.tune_host()
  host.use_compile_cache()
  with os.fdopen(options['pipe'], 'w', encoding='utf-8') as pipe:

    def send(message: dict[str, Any]) -> None:
      pipe.write(json.dumps(message) + '\n')
      pipe.flush()

    for name in names:
      send(dict(begin=name))
      if options['traces']:
        from jaxpost.tools.accelerator import workload

        workload.keep_traces(os.path.join(options['traces'], name.replace('/', '-')))
      left = options['end'] - time.monotonic() - _MARGIN
      line = measure(name, rows_lib.ROWS[name], options['tiny'], left)
      gc.collect()  # frees the arrays of a row before the next one
      send(line)
      if any(x in line.get('error', '') for x in _FATAL):
        return


if __name__ == '__main__':
  main(sys.argv[1:])
