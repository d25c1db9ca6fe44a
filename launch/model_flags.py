"""Flags that name the weights of a command (--run, --model and the like) and its chat template, and its start."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from absl import flags

flags.disclaim_key_flags()  # the flags belong to the command that defines them


class _StepParser(flags.IntegerParser):
  """Parses a step, or the word best."""

  def parse(self, argument: str | int) -> Any:
    """Returns an int or 'best'; ValueError for other words."""
    return argument if argument == 'best' else super().parse(argument)


class ModelFlags(NamedTuple):
  """The flags that select a checkpoint of a run or a model folder."""

  run: flags.FlagHolder
  model: flags.FlagHolder
  stage: flags.FlagHolder
  step: flags.FlagHolder
  template_kwargs: flags.FlagHolder
  chat_template: flags.FlagHolder

  def arguments(self) -> dict[str, Any]:
    """Returns the arguments of `inference.load`."""
    return {name: flag.value for name, flag in self._asdict().items()}

  @property
  def name(self) -> str:
    """The folder of the run or of the model."""
    return self.run.value or self.model.value


def define() -> ModelFlags:
  """Defines the flags for the calling command."""
  return ModelFlags(
    run=flags.DEFINE_string('run', '', 'Folder of a run.'),
    model=flags.DEFINE_string(
      'model', '', 'Hugging Face folder, org/name, or folder of a PEFT adapter; instead of --run.'
    ),
    stage=flags.DEFINE_string('stage', '', 'Stage of the run; default: the last one with a checkpoint.'),
    template_kwargs=flags.DEFINE_string(
      'template_kwargs',
      '',
      'Variables of the chat template as a JSON object, over those of the run or the model folder: '
      '\'{"enable_thinking": true}\'.',
    ),
    chat_template=flags.DEFINE_string(
      'chat_template',
      '',
      "Chat template instead of the tokenizer's own: a name such as chatml, or a .jinja file; for base models.",
    ),
    step=flags.DEFINE(
      _StepParser(lower_bound=0),
      'step',
      None,
      'Step of the checkpoint, or best: that of config.save.keep_best; default: the newest good one.',
    ),
  )


def starting() -> contextlib.AbstractContextManager:
  """Shows on stderr that a command is starting while its modules are imported, unless that is quick."""
  from jaxpost.tools.working import working

  return working('starting')
