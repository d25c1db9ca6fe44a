"""Shows the data, prompts and rewards of a config; makes no weights, trains nothing.

  python -m launch.inspect --config=configs/quickstart.py
  python -m launch.inspect --config=my.py --stage=grpo --rows=8
  jaxpost inspect --config=my.py --config.data.path=train.jsonl

For each stage: the first rows as the model sees them, with the rendered template,
token ids, trained tokens in green and the others dim, then lengths and packing; an
output without colors has trained tokens between « and ». For a stage that samples:
the prompts, the columns that reward functions receive, and the reward functions,
imported as they will be in training.
"""

import contextlib
import logging

from absl import flags

from . import config_flag

_CONFIG = config_flag.define_config()
_ROWS = flags.DEFINE_integer('rows', 3, 'Rows to show of each stage.', lower_bound=0)
_STAGE = flags.DEFINE_string('stage', '', 'Show only this stage.')
flags.mark_flags_as_required(['config'])


def main(argv):
  """Prints what each stage reads."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  import rich.console
  import rich.text

  from jaxpost.data import preview
  from jaxpost.monitor import activity
  from jaxpost.stage import prepare
  from jaxpost.tools import inference, preview_stage

  console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
  with activity.Activity(rich.console.Console(stderr=True))('reading data and the headers of weights'):
    prepared = prepare.prepare_all(prepare.as_dict(_CONFIG.value))  # with all checks of training
  with contextlib.ExitStack() as cleanup:
    for stage in prepared:
      cleanup.callback(stage.close)
    shown = {stage.name: stage for stage in prepared}
    if _STAGE.value:
      shown = dict([inference.pick(shown, _STAGE.value, '--config')])
    for stage in shown.values():
      for part in preview_stage.show_stage(stage, _ROWS.value):
        is_marked = isinstance(part, rich.text.Text) and (console.no_color or not console.color_system)
        console.print(preview.marked(part) if is_marked else part)
      console.print()


if __name__ == '__main__':
  from . import exits

  exits.run(main)
