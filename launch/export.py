"""Writes a checkpoint of a run as a Hugging Face folder.

  python -m launch.export --run=runs/quickstart --out=exports/quickstart
  python -m launch.export --run=runs/quickstart --stage=sft --step=400 --out=F
  python -m launch.export --model=ADAPTER_FOLDER --out=F  # merged into its base

The default is the newest good checkpoint of the last stage that has one. Needs
config.json and checkpoints/ of the run and the tokenizer that the config names, but
not its data, reward functions or devices. Prints the folder.
"""

import logging

from absl import flags

from jaxpost.hardware import host

from . import model_flags

_WEIGHTS = model_flags.define()
_OUT = flags.DEFINE_string('out', None, 'Folder to write.')
flags.mark_flags_as_required(['out'])


def main(argv):
  """Exports the checkpoint and prints the folder."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  from jaxpost.formats import hf
  from jaxpost.tools import inference

  hf.check_target(_OUT.value)  # before minutes of reading
  weights = inference.load(**_WEIGHTS.arguments())
  inference.export(weights, _OUT.value)
  inference.to_stderr(f'step {weights.step} of stage {weights.inputs.name}')
  print(_OUT.value)


if __name__ == '__main__':
  from . import exits

  exits.run(main)
