"""Measures the suite or the reward that `launch.evaluate` names by --suite or --reward."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxpost.errors import InputError

from . import exits, model_flags, sampling_flags


def measure(model: model_flags.ModelFlags, sampling: sampling_flags.SamplingFlags) -> dict[str, Any]:
  """Returns the figures of --suite, or those of samples graded by --reward, such as pass@k."""
  with model_flags.starting():
    from jaxpost.tools import completions, inference, score_dataset, suites

  values = flags.FLAGS
  if values.suite and not suites.find(values.suite).reward:  # before weights are read
    exits.refuse(('out', *sampling._fields), f'with --suite={values.suite}, which compares log-probs of the choices')
  weights = inference.load(**model.arguments())
  draws = completions.Draws(**sampling.arguments())
  options = dict(mesh=values.mesh, source=model.name)
  origin = dict(weights=model.name, stage=weights.inputs.name, step=weights.step)
  if values.suite:
    figures = suites.measure(values.suite, weights, values.data, values.out, draws, size=values.size or 0, **options)
    return origin | figures
  rows = score_dataset.read(values.data, values.columns, values.map, values.size)
  if isinstance(rows[0].get('prompt'), str) and weights.inputs.tokenizer.chat_template:
    inference.to_stderr(
      f'{values.data}: its prompts are plain text and are continued as they are, as in training; for messages in the'
      ' chat template, --map=jaxpost.data.maps:as_chat'
    )
  grading = score_dataset.Grading(values.pass_reward, values.correct_by, _numbers(values.reward_weights))
  if model.run.value:
    given = {name for name in (*sampling._fields, *grading._fields) if values[name].present}
    draws, grading = score_dataset.as_in_run(weights.inputs, values.reward, draws, grading, given)
    inference.to_stderr(
      f'--run: evaluates as the run does, except for what flags say: {score_dataset.described(draws, grading)}'
    )
  figures = score_dataset.measure(weights, rows, values.reward, values.out, draws, grading=grading, **options)
  return dict(**origin, data=values.data, graded_by=values.reward, **figures)


def _numbers(words: list[str]) -> tuple[float, ...]:
  """Returns the numbers of --reward_weights, in brackets or not."""
  try:
    return tuple(float(word.strip(' ()[]')) for word in words)
  except ValueError:
    raise InputError(f'--reward_weights: {",".join(words)} is not a list of numbers, such as 1.0,0.5') from None
