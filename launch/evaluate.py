"""Scores a checkpoint of a run, or a model folder, on held-out data.

  python -m launch.evaluate --model=FOLDER --data=test.jsonl --reward=gsm8k \\
    --n=8 --out=runs/scores
  python -m launch.evaluate --run=runs/quickstart
  python -m launch.evaluate --run=runs/quickstart --stage=sft --samples=16
  python -m launch.evaluate --model=FOLDER --config=configs/quickstart.py

With --reward (a name, pkg.module:fn or ./file.py:fn) it grades n samples of
each prompt; --out keeps them, and the same command goes on after a kill. Else
it measures what the run's config evaluates, or --config. One line of JSON.
"""

import json
import logging

from absl import flags

from jaxpost.errors import InputError
from jaxpost.hardware import host

from . import config_flag, exits

_RUN = flags.DEFINE_string('run', '', 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'Default: the newest checkpoint.')
_STAGE = flags.DEFINE_string('stage', '', 'Default: the last with any.')
_MODEL = flags.DEFINE_string('model', '', 'Hugging Face folder or org/name.')
_CONFIG = config_flag.define_config()
_DATA = flags.DEFINE_string('data', '', 'Instead of config.eval.data.path.')
_SIZE = flags.DEFINE_integer('size', None, 'Rows at most; instead of config.eval.size.', lower_bound=1)
_SAMPLES = flags.DEFINE_integer('samples', None, 'Instead of config.eval.samples.', lower_bound=0)
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'As config.mesh.rollout.')
_REWARD = flags.DEFINE_string('reward', '', 'As config.reward; needs --data.')
_OUT = flags.DEFINE_string('out', '', 'With --reward: folder of what is made.')
_COLUMNS = flags.DEFINE_string('columns', '', 'With --reward: as data.columns.')
_MAP = flags.DEFINE_string('map', '', 'With --reward: as config.data.map.')
_PASS = flags.DEFINE_float('pass_reward', 1.0, 'With it one has passed.')
_N = flags.DEFINE_integer('n', 1, 'Samples a prompt.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.', lower_bound=0)
_MAX = flags.DEFINE_integer('max_new_tokens', 512, 'At most.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, '0 is greedy.', lower_bound=0.0)
_TOP_P = flags.DEFINE_float('top_p', 1.0, '1 is off.', lower_bound=1e-6, upper_bound=1.0)


def by_reward(which):
  from jaxpost.tools import completions, inference, score_dataset

  rows = score_dataset.read(_DATA.value, _COLUMNS.value, _MAP.value, _SIZE.value)
  return dict(
    data=_DATA.value,
    graded_by=_REWARD.value,
    **score_dataset.measure(
      inference.load(*which),
      rows,
      _REWARD.value,
      _OUT.value,
      completions.Draws(_N.value, _SEED.value, _MAX.value, _TEMPERATURE.value, 0, _TOP_P.value),
      mesh=_MESH.value,
      source=_RUN.value or _MODEL.value,
      pass_reward=_PASS.value,
    ),
  )


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  if _REWARD.value and not _DATA.value:
    raise InputError('--reward needs --data=FILE, whose prompts it grades')
  if _MODEL.value and _CONFIG.value is None and not _REWARD.value:
    raise InputError('--model needs --data and --reward, or --config=FILE')
  exits.refuse(
    ['config', 'samples']
    if _REWARD.value
    else ['out', 'columns', 'map', 'pass_reward', 'n', 'seed', 'max_new_tokens', 'temperature', 'top_p'],
    f'with{"" if _REWARD.value else "out"} --reward',
  )
  host.tune_host()
  host.use_compile_cache()
  which = _RUN.value, _MODEL.value, _STAGE.value, _STEP.value
  if _REWARD.value:
    return print(json.dumps(by_reward(which)))
  from jaxpost.tools import inference

  print(json.dumps(inference.evaluate_as(*which, _CONFIG.value, _MESH.value, _DATA.value, _SIZE.value, _SAMPLES.value)))


if __name__ == '__main__':
  exits.run(main)
