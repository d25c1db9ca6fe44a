"""Completes prompts with a checkpoint of a run or with a model folder.

  python -m launch.sample --run=runs/quickstart --prompt='17+25='
  python -m launch.sample --model=FOLDER --chat
  python -m launch.sample --model=FOLDER --prompts=IN.jsonl --out=OUT.jsonl
  python -m launch.sample --model=FOLDER --nochat --prompt='Once upon a time'

--prompt is a user's message if the tokenizer has a chat template, unless the run learns from plain text; otherwise it
is text to continue, as are texts in IN. --chat makes all of them messages, --nochat text; --chat without a prompt
starts a conversation. Rows of IN have a column `prompt` (text or messages), `prompt_ids`, `messages` or `text`; prompts
of a .txt file are separated by blank lines. OUT adds `completions`, `completion_ids` and `logprobs`; the same command
continues after an interruption. Each --adapter completes all prompts. The same seed gives the same completions.
"""

import logging
import sys

from absl import flags

from jaxpost.errors import InputError
from jaxpost.hardware import host

from . import exits, model_flags, sampling_flags

_WEIGHTS = model_flags.define()
_ADAPTER = flags.DEFINE_multi_string('adapter', [], 'PEFT adapter as NAME=FOLDER')
_PROMPT = flags.DEFINE_multi_string('prompt', [], 'Prompt')
_FILE = flags.DEFINE_string('prompts', '', 'Data with prompts, in any format that training reads.')
flags.DEFINE_alias('file', 'prompts')
_OUT = flags.DEFINE_string('out', '', 'File for the completions, .jsonl.')
_SAMPLING = sampling_flags.define(max_new_tokens=128)
_TOP_K = flags.DEFINE_integer('top_k', 0, 'Sample from this many most probable tokens only; 0: off.', lower_bound=0)
_TOP_LOGPROBS = flags.DEFINE_integer(
  'top_logprobs', 0, 'Write the log-probs of this many most probable tokens at each position to --out.', lower_bound=0
)
_CHAT = flags.DEFINE_bool(
  'chat', None, 'Make prompts messages of a chat; without any, start one. --nochat: use no template.'
)
_JSON = flags.DEFINE_bool('json', False, 'Print each completion as a JSON object.')
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'Device mesh, written as config.mesh.rollout.')


def main(argv):
  """Completes the prompts, or starts a conversation."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  if not (_PROMPT.value or _FILE.value or _CHAT.value):
    raise InputError('nothing to do; give --prompt=, --prompts= or --chat')
  talks = _CHAT.value and not (_PROMPT.value or _FILE.value)
  if talks:
    exits.refuse(('out', 'n', 'json'), 'with --chat and no prompts')
  if _OUT.value:
    exits.refuse(('json',), 'with --out, whose rows are JSON')
  else:
    exits.refuse(('top_logprobs',), 'without --out')
  host.tune_host()
  with model_flags.starting():
    host.use_compile_cache()
    from jaxpost.tools import chat, completion_files, completions, inference

  each = inference.adapters(inference.load(**_WEIGHTS.arguments()), _ADAPTER.value)
  draws = completions.Draws(**_SAMPLING.arguments(), top_k=_TOP_K.value, top_logprobs=_TOP_LOGPROBS.value)
  if talks:
    models = {_WEIGHTS.name: completions.only(each, '--chat')}
    if not _SAMPLING.max_new_tokens.present:
      draws = chat.with_room(draws, models)
    return chat.chat_loop(models, draws, _MESH.value, [], sys.stdin, out=sys.stdout)
  weights = next(iter(each.values()))
  prompts = completions.make_prompts(weights, _PROMPT.value, _FILE.value, _CHAT.value, tell=inference.to_stderr)
  completion_files.complete_all(
    each, prompts, draws, _MESH.value, _OUT.value, source=_WEIGHTS.name, show=completions.printer(draws.n, _JSON.value)
  )


if __name__ == '__main__':
  exits.run(main)
