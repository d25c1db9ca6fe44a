"""Writes a checkpoint of a run as a Hugging Face folder.

  python -m launch.export --run=runs/quickstart --out=exports/quickstart
  python -m launch.export --run=runs/quickstart --stage=sft --step=400 --out=F
  python -m launch.export --model=ADAPTER_FOLDER --out=F  # merged into its base

The last stage that has a checkpoint, and its newest good step, unless told
otherwise. Needs config.json and checkpoints/ of the run and the tokenizer it
names; neither its data, its rewards nor its devices. Prints the folder.
"""

import logging

from absl import flags

from jaxpost.hardware import host

_RUN = flags.DEFINE_string('run', '', 'Folder of the run.')
_MODEL = flags.DEFINE_string('model', '', 'Or a folder of a model or of peft.')
_STEP = flags.DEFINE_integer('step', None, 'Updates of the stage; default: the newest good checkpoint.')
_STAGE = flags.DEFINE_string('stage', '', 'Stage of the run; default: the last that has a checkpoint.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write.')
flags.mark_flags_as_required(['out'])


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  from jaxpost.formats import hf
  from jaxpost.tools import inference

  hf.check_target(_OUT.value)  # before minutes of reading
  weights = inference.load(_RUN.value, _MODEL.value, _STAGE.value, _STEP.value)
  inference.export(weights, _OUT.value)
  inference.to_stderr(f'step {weights.step} of stage {weights.prepared.name}')
  print(_OUT.value)


if __name__ == '__main__':
  from . import exits

  exits.run(main)
