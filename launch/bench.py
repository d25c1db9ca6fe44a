"""Times the standard workload on this machine: sft, sample or grpo.

  python -m launch.bench sft --shape=xs --batch=4 --bf16
  python -m launch.bench sample --batch=16 --new=512 --samples=64 --ragged
  python -m launch.bench grpo --shape=xs --batch=16 --new=128 --bf16

Prints one JSON line; jaxpost/bench.py says what is counted.
"""

import dataclasses
import json
import tempfile

from absl import flags

from jaxpost import errors, host

_SHAPE = flags.DEFINE_enum('shape', 'xs', ['xs', 's'], 'Size of the model.')
_BATCH = flags.DEFINE_integer(
    'batch', 16, 'Rows (sft), sequences in flight (sample), completions.')
_STEPS = flags.DEFINE_integer('steps', 5, 'Timed steps.')
_NEW = flags.DEFINE_integer('new', 128, 'Tokens of a completion.')
_SAMPLES = flags.DEFINE_integer(
    'samples', 0, 'Completions in all; 0: as many as --batch.')
_RAGGED = flags.DEFINE_bool(
    'ragged', False, 'Completions of geometric length.')
_MEAN = flags.DEFINE_integer('mean', 64, 'Their mean.')
_BF16 = flags.DEFINE_bool(
    'bf16', False, 'bfloat16 operands, float32 accumulation and weights.')
_TOP_P = flags.DEFINE_float('top_p', 1.0, 'Nucleus of sampling.')
_TUNE = flags.DEFINE_bool('tune', True, 'Tune the allocator of the host.')

WHAT = ('sft', 'sample', 'grpo')


def main(argv):
  if len(argv) != 2 or argv[1] not in WHAT:
    raise errors.InputError(
        f'say what to time: python -m launch.bench {"|".join(WHAT)} [flags]')
  if _TUNE.value:
    host.tune_host()
  host.use_compile_cache()
  from jaxpost import bench
  names = [f.name for f in dataclasses.fields(bench.Options)]
  options = bench.Options(**{n: flags.FLAGS[n].value for n in names})
  with tempfile.TemporaryDirectory() as workdir:
    figures = bench.run(argv[1], options, workdir)
  print(json.dumps({**figures, 'tuned': _TUNE.value}))


if __name__ == '__main__':
  from . import exits
  exits.run(main, words=1)
