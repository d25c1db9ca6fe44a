"""The main function of the scripts that measure the standard workload: flags in, one line of JSON out."""

import json
import tempfile
from collections.abc import Callable

from absl import flags

from jaxpost.hardware import host
from jaxpost.tools import bench
from launch import exits, workload_flags

flags.disclaim_key_flags()  # the flags belong to the script that runs


def run(name: str, measure: Callable[[bench.Options, str], dict]) -> None:
  """Parses the flags of the workload, prints `measure(options, workdir)` and ends the process.

  Args:
    name: of the benchmark, as the record has it.
    measure: (options, folder for files) -> figures.
  """
  workload_flags.define()

  def main(_):
    if flags.FLAGS.tune:
      host.tune_host()
    host.use_compile_cache()
    options = workload_flags.options()
    with tempfile.TemporaryDirectory() as workdir:
      print(json.dumps(bench.record(name, options, measure(options, workdir)) | {'tuned': flags.FLAGS.tune}))

  exits.run(main)
