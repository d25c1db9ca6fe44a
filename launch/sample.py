"""Completes prompts with a checkpoint of a run or with a model folder.

  python -m launch.sample --run=runs/quickstart --prompt='17+25='
  python -m launch.sample --model=FOLDER --chat
  python -m launch.sample --model=FOLDER --prompts=IN.jsonl --out=OUT.jsonl
  python -m launch.sample --model=FOLDER --nochat --prompt='Once upon a time'

A prompt is what a user says where the tokenizer has a chat template, else (or
with --nochat) a text to go on with. Rows of IN have a column `prompt` (text or
messages), `prompt_ids`, `messages` or `text`; lines of a .txt are prompts. OUT
adds `completions`, `completion_ids`, `logprobs`; killed, the same goes on.
--chat talks. Each --adapter answers. A seed gives the same completions.
"""

import logging
import sys

from absl import flags

from jaxpost.errors import InputError
from jaxpost.hardware import host

from . import exits

_RUN = flags.DEFINE_string('run', '', 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'Default: the newest checkpoint.')
_STAGE = flags.DEFINE_string('stage', '', 'Default: the last with any.')
_MODEL = flags.DEFINE_string('model', '', 'Hugging Face folder or org/name.')
_ADAPTER = flags.DEFINE_multi_string('adapter', [], 'NAME=FOLDER of peft.')
_PROMPT = flags.DEFINE_multi_string('prompt', [], 'Prompt; may be repeated.')
_FILE = flags.DEFINE_string('prompts', '', 'Prompts, as any data here.')
flags.DEFINE_alias('file', 'prompts')
_OUT = flags.DEFINE_string('out', '', '.jsonl of completions.')
_MAX = flags.DEFINE_integer('max_new_tokens', 128, 'At most.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, '0 is greedy.', 0.0)
_TOP_K = flags.DEFINE_integer('top_k', 0, '0 is off.', lower_bound=0)
_TOP_P = flags.DEFINE_float('top_p', 1.0, '1 is off.', 1e-6, 1.0)
_TOP = flags.DEFINE_integer('top_logprobs', 0, 'Of the likeliest, to --out.')
_N = flags.DEFINE_integer('n', 1, 'Completions of each.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.', lower_bound=0)
_CHAT = flags.DEFINE_bool('chat', None, 'Talk; --nochat: no chat template.')
_JSON = flags.DEFINE_bool('json', False, 'One JSON object a completion.')
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'As config.mesh.rollout.')


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  if not (_PROMPT.value or _FILE.value or _CHAT.value):
    raise InputError('nothing to do; give --prompt=, --prompts= or --chat')
  if _CHAT.value:
    exits.refuse(('prompts', 'out', 'n', 'json'), 'with --chat')
  host.tune_host()
  host.use_compile_cache()
  from jaxpost.tools import chat, completion_files, completions, inference

  each = inference.adapters(inference.load(_RUN.value, _MODEL.value, _STAGE.value, _STEP.value), _ADAPTER.value)
  draws = completions.Draws(*(flag.value for flag in (_N, _SEED, _MAX, _TEMPERATURE, _TOP_K, _TOP_P, _TOP)))
  if _CHAT.value:
    return chat.chat_loop(completions.only(each, '--chat'), draws, _MESH.value, [*_PROMPT.value], sys.stdin, sys.stdout)
  prompts = completions.make_prompts(next(iter(each.values())), _PROMPT.value, _FILE.value, _CHAT.value)
  completion_files.finish(
    each,
    prompts,
    draws,
    _MESH.value,
    _OUT.value,
    _RUN.value or _MODEL.value,
    completions.show_json if _JSON.value else completions.show,
  )


if __name__ == '__main__':
  exits.run(main)
