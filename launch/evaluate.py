"""Scores a checkpoint of a run, or a model folder, on held-out data.

  python -m launch.evaluate --run=runs/quickstart
  python -m launch.evaluate --run=runs/quickstart --stage=sft --samples=16
  python -m launch.evaluate --run=DIR --data=test.jsonl --size=1000
  python -m launch.evaluate --model=FOLDER --config=configs/quickstart.py

Measures what the run's own config evaluates (held-out loss, pass@k), or what
--config says where one is given. Prints one line of JSON.
"""

import dataclasses
import json
import logging

from absl import flags
from ml_collections import config_flags

from jaxpost import host
from jaxpost.errors import InputError

_RUN = flags.DEFINE_string('run', '', 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'Default: the newest checkpoint.')
_STAGE = flags.DEFINE_string('stage', '', 'Default: the last with any.')
_MODEL = flags.DEFINE_string('model', '', 'Hugging Face folder or org/name.')
_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file, FILE.py[:args].', lock_config=True)
_DATA = flags.DEFINE_string('data', '', 'Instead of config.eval.data.path.')
_SIZE = flags.DEFINE_integer(
    'size', None, 'Instead of config.eval.size.', lower_bound=1)
_SAMPLES = flags.DEFINE_integer(
    'samples', None, 'Instead of config.eval.samples.', lower_bound=0)
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'As config.mesh.rollout.')


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  if _MODEL.value and _CONFIG.value is None:
    raise InputError('--model needs --config=FILE, which says how to evaluate')
  host.tune_host()
  host.use_compile_cache()
  from jaxpost import build, config, inference
  stages = {} if _CONFIG.value is None else config.parse(
      build.as_dict(_CONFIG.value))
  name, wanted = _STAGE.value, None
  if _MODEL.value and stages:
    name, wanted = inference.pick(stages, name, '--config')
  weights = inference.load(
      _RUN.value, _MODEL.value, name, _STEP.value, wanted)
  name = weights.prepared.name
  if _RUN.value and stages:  # a stage of that name, else the last
    wanted = stages.get(name) or inference.pick(stages, '', '--config')[1]
  wanted = wanted or weights.prepared.config
  fields = dict(size=_SIZE.value, samples=_SAMPLES.value)
  if _DATA.value:
    fields['data'] = dataclasses.replace(wanted.eval.data, path=_DATA.value)
  fields = {k: v for k, v in fields.items() if v is not None}
  wanted = dataclasses.replace(
      wanted, eval=dataclasses.replace(wanted.eval, **fields))
  metrics = inference.evaluate(weights, wanted, _MESH.value)
  print(json.dumps(dict(
      weights=_RUN.value or _MODEL.value, stage=name, step=weights.step,
      **metrics)))


if __name__ == '__main__':
  from . import exits
  exits.run(main)
