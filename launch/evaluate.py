"""Evaluates a checkpoint of a run, or a model folder, on held-out data.

  python -m launch.evaluate --model=FOLDER --data=test.jsonl --reward=gsm8k \\
    --n=8 --out=runs/scores
  python -m launch.evaluate --run=runs/quickstart --stage=sft --n=16
  python -m launch.evaluate --model=FOLDER --config=configs/quickstart.py
  python -m launch.evaluate --model=FOLDER --suite=mmlu --data=questions.jsonl

--suite is gsm8k, math500, ifeval, mmlu or choices (docs/sampling.md). With --reward
(a name, pkg.module:fn or ./file.py:fn), n samples of each prompt are graded; of a --run
that samples, they are drawn and graded as it evaluates, except for what flags say. --out
keeps them; the same command continues after an interruption. Without either, the
evaluation of the run's config or of --config is computed. Prints JSON.
"""

import json
import logging

from absl import flags

from jaxpost.errors import InputError
from jaxpost.hardware import host

from . import config_flag, exits, grading, model_flags, sampling_flags

_WEIGHTS = model_flags.define()
_CONFIG = config_flag.define_config()
_DATA = flags.DEFINE_string('data', '', 'Data to evaluate on; default: config.eval.data.path.')
_SIZE = flags.DEFINE_integer('size', None, 'Rows to evaluate at most; default: config.eval.size.', lower_bound=1)
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'Device mesh, written as config.mesh.rollout.')
_SUITE = flags.DEFINE_string('suite', '', 'gsm8k, math500, ifeval, mmlu or choices: graded as usual; needs --data.')
_REWARD = flags.DEFINE_string('reward', '', 'Reward function, as config.reward; needs --data.')
_OUT = flags.DEFINE_string('out', '', 'Folder for completions and grades; with --reward.')
_COLUMNS = flags.DEFINE_string('columns', '', 'Columns to rename, as config.data.columns; with --reward.')
_MAP = flags.DEFINE_string('map', '', 'Function applied to each row, as config.data.map; with --reward.')
_PASS = flags.DEFINE_float('pass_reward', 1.0, 'Value of --correct_by from which a sample counts as passed.')
_CORRECT = flags.DEFINE_string('correct_by', '', 'Name of the reward that decides what is correct; default: the first.')
_REWARD_WEIGHTS = flags.DEFINE_list(
  'reward_weights', [], 'Weight of each reward in the figure `reward`; default: those of the run, or 1 each.'
)
_N = flags.DEFINE_integer(
  'n', None, 'Completions per prompt; default: as in the config; with --model and --reward: 1.', lower_bound=0
)
flags.DEFINE_alias('samples', 'n')
_SAMPLING = sampling_flags.define(max_new_tokens=512, several=False)._replace(n=_N)  # with --reward
_ONLY_WITH_REWARD = ('columns', 'map', 'pass_reward', 'correct_by', 'reward_weights')
_ONLY_WITH_SAMPLES = ('out', *(name for name in _SAMPLING._fields if name != 'n'))


def main(argv):
  """Checks which flags go together, evaluates, and prints the metrics."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  with model_flags.starting():
    host.use_compile_cache()
  if _SUITE.value or _REWARD.value:
    flag = 'suite' if _SUITE.value else 'reward'
    if not _DATA.value:
      raise InputError(f'--{flag} needs --data=FILE, whose prompts it grades')
    exits.refuse(('config',), f'with --{flag}')
    if _N.value == 0:
      raise InputError(f'--n: 0 completions leave nothing to grade with --{flag}; give at least 1')
    if _SUITE.value:
      exits.refuse(('reward', *_ONLY_WITH_REWARD), 'with --suite')
    metrics = grading.measure(_WEIGHTS, _SAMPLING)
  else:
    if _WEIGHTS.model.value and not _WEIGHTS.run.value and _CONFIG.value is None:
      raise InputError('--model goes with --data and one of --reward and --suite, or else with --config=FILE')
    exits.refuse((*_ONLY_WITH_REWARD, *_ONLY_WITH_SAMPLES), 'without --reward or --suite')
    with model_flags.starting():
      from jaxpost.tools import inference

    options = dict(config=_CONFIG.value, mesh=_MESH.value, data=_DATA.value, size=_SIZE.value, samples=_N.value)
    metrics = inference.evaluate_as(**_WEIGHTS.arguments(), **options)
  print(json.dumps(metrics))


if __name__ == '__main__':
  exits.run(main)
