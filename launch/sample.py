"""Completes prompts with a checkpoint of a run or with a model folder.

  python -m launch.sample --run=runs/quickstart --prompt='17+25='
  python -m launch.sample --model=exports/quickstart --prompt=1+1= --n=4 --json
  python -m launch.sample --model=FOLDER --nochat --prompt='Once upon a time'
  python -m launch.sample --run=DIR --file=prompts.jsonl --temperature=0

A prompt is what a user says where the tokenizer has a chat template (--chat),
else a text to go on with (--nochat). Rows of --file have a column `prompt`
(text or messages), `messages` or `text`; lines of a .txt are prompts. The same
seed gives the same completions.
"""

import json
import logging

import rich.console
import rich.text
from absl import flags

from jaxpost import host
from jaxpost.errors import InputError

_RUN = flags.DEFINE_string('run', '', 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'Default: the newest checkpoint.')
_STAGE = flags.DEFINE_string('stage', '', 'Default: the last with any.')
_MODEL = flags.DEFINE_string('model', '', 'Hugging Face folder or org/name.')
_PROMPT = flags.DEFINE_multi_string('prompt', [], 'Prompt; may be repeated.')
_FILE = flags.DEFINE_string('file', '', 'Prompts, as any data of this library.')
_MAX = flags.DEFINE_integer('max_new_tokens', 128, 'At most.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    'temperature', 1.0, '0 is greedy.', lower_bound=0.0)
_TOP_K = flags.DEFINE_integer('top_k', 0, '0 is off.', lower_bound=0)
_TOP_P = flags.DEFINE_float(
    'top_p', 1.0, '1 is off.', lower_bound=1e-6, upper_bound=1.0)
_N = flags.DEFINE_integer('n', 1, 'Completions of each.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.', lower_bound=0)
_CHAT = flags.DEFINE_bool('chat', None, 'Default: if there is a template.')
_JSON = flags.DEFINE_bool('json', False, 'One JSON object a completion.')
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'As config.mesh.rollout.')


def show(row):
  text = row['prompt'] if isinstance(row['prompt'], str) else (
      row['prompt'][-1]['content'] + '\n')
  rich.console.Console(highlight=False, soft_wrap=True).print(
      rich.text.Text.assemble((text, 'dim'), (row['completion'], 'green')))


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  if not _PROMPT.value and not _FILE.value:
    raise InputError('nothing to complete; give --prompt=TEXT or --file=FILE')
  host.tune_host()
  host.use_compile_cache()
  from jaxpost import inference
  weights = inference.load(
      _RUN.value, _MODEL.value, _STAGE.value, _STEP.value)
  prompts = inference.make_prompts(
      weights, _PROMPT.value, _FILE.value, _CHAT.value)
  rollout = inference.complete(
      weights, prompts, n=_N.value, seed=_SEED.value,
      max_new_tokens=_MAX.value, temperature=_TEMPERATURE.value,
      top_k=_TOP_K.value, top_p=_TOP_P.value, mesh=_MESH.value)
  for row in inference.completion_rows(rollout, weights.prepared.tokenizer):
    print(json.dumps(row)) if _JSON.value else show(row)
  cut = int((~rollout.finished).sum())
  if cut:
    inference.to_stderr(
        f'{cut} of {len(rollout.lengths)} cut at --max_new_tokens')


if __name__ == '__main__':
  from . import exits
  exits.run(main)
