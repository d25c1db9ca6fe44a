"""Writes a checkpoint of a run as a Hugging Face folder.

  python -m launch.export --run=runs/quickstart --out=exports/quickstart
  python -m launch.export --run=runs/quickstart --stage=sft --step=400 --out=F
  python -m launch.export --run=runs/quickstart --out=F --push=ORG/NAME
  python -m launch.export --model=ADAPTER_FOLDER --out=F  # merged into its base

The default is the newest good checkpoint of the last stage that has one. Needs
config.json and checkpoints/ of the run and the tokenizer that the config names, but
not its data, reward functions or devices. The model card names base model, method, data, metrics,
command and versions of the run. --push uploads the folder to the Hugging Face hub, as a private
model; without a token it only lists what would be sent. Prints the folder.
"""

import logging

from absl import flags

from jaxpost.hardware import host

from . import exits, model_flags

_WEIGHTS = model_flags.define()
_OUT = flags.DEFINE_string('out', None, 'Folder to write.')
_PUSH = flags.DEFINE_string('push', '', 'Model of the hub to upload to, as ORG/NAME.')
_PUBLIC = flags.DEFINE_bool('public', False, 'Make a new model of the hub public.')
flags.mark_flags_as_required(['out'])


def main(argv):
  """Exports the checkpoint and prints the folder."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  if not _PUSH.value:
    exits.refuse(('public',), 'without --push')
  host.tune_host()
  with model_flags.starting():
    host.use_compile_cache()
    from jaxpost.formats import hf_export
    from jaxpost.stage import export
    from jaxpost.tools import inference, push

  hf_export.check_target(_OUT.value)  # before weights are read, which takes minutes
  weights = inference.load(**_WEIGHTS.arguments())
  name = weights.inputs.name
  export.check_stage(_OUT.value, name)
  inference.export(weights, _OUT.value)
  if _WEIGHTS.run.value:
    export.write_card(_OUT.value, _WEIGHTS.run.value, name, weights.step)
  if _PUSH.value:
    push.push(_OUT.value, _PUSH.value, _PUBLIC.value, inference.to_stderr)
  inference.to_stderr(f'step {weights.step} of stage {weights.inputs.name}')
  print(_OUT.value)


if __name__ == '__main__':
  exits.run(main)
