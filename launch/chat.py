"""Talks with a model on the terminal; answers appear as they are decoded.

  python -m launch.chat --run=runs/quickstart
  python -m launch.chat --model=FOLDER_OR_ADAPTER --system='Answer in one sentence.'
  python -m launch.chat --run=runs/quickstart --beside_model=FOLDER    # both answer

Needs a tokenizer with a chat template. /reset starts over, /system TEXT starts over with a system
message, /exit or Ctrl-D ends.
"""

import logging
import sys

from absl import flags

from jaxpost.errors import InputError
from jaxpost.hardware import host

from . import exits, model_flags, sampling_flags

_WEIGHTS = model_flags.define()
_ADAPTER = flags.DEFINE_string('adapter', '', 'PEFT adapter on the weights, as NAME=FOLDER.')
_BESIDE_RUN = flags.DEFINE_string('beside_run', '', 'Folder of another run whose newest model also answers.')
_BESIDE_MODEL = flags.DEFINE_string('beside_model', '', 'Another model folder, org/name or adapter that also answers.')
_SYSTEM = flags.DEFINE_string('system', '', 'System message of the chat.')
_SAMPLING = sampling_flags.define(max_new_tokens=512, several=False)
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'Device mesh, written as config.mesh.rollout.')


def main(argv):
  """Reads messages until the end."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  with model_flags.starting():
    host.use_compile_cache()
    from jaxpost.tools import chat, completions, inference

  each = inference.adapters(inference.load(**_WEIGHTS.arguments()), [_ADAPTER.value] if _ADAPTER.value else [])
  weights = completions.only(each, '--adapter')
  models = {_WEIGHTS.name: weights}
  beside = _BESIDE_RUN.value or _BESIDE_MODEL.value
  if _BESIDE_RUN.value and _BESIDE_MODEL.value:
    raise InputError('--beside_run, --beside_model: two models are shown side by side; give one of these flags')
  if beside:
    template = {name: _WEIGHTS.arguments()[name] for name in ('template_kwargs', 'chat_template')}
    other = inference.load(run=_BESIDE_RUN.value, model=_BESIDE_MODEL.value, **template)
    models[beside if beside not in models else f'{beside} (beside)'] = other
  chat.check_templates(models)
  draws = completions.Draws(**_SAMPLING.arguments())
  if not _SAMPLING.max_new_tokens.present:
    draws = chat.with_room(draws, models)
  inference.to_stderr(chat.opening(_WEIGHTS.name, weights.step if _WEIGHTS.run.value else None, draws))
  first = [f'/system {_SYSTEM.value}'] if _SYSTEM.value else []
  chat.chat_loop(models, draws, _MESH.value, first, sys.stdin, out=sys.stdout)


if __name__ == '__main__':
  exits.run(main)
