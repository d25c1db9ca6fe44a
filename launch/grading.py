"""Measures the suite or the reward that `launch.evaluate` names by --suite or --reward."""

from __future__ import annotations

from typing import Any

from absl import flags

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
  grading = dict(pass_reward=values.pass_reward, correct_by=values.correct_by)
  figures = score_dataset.measure(weights, rows, values.reward, values.out, draws, **grading, **options)
  return dict(**origin, data=values.data, graded_by=values.reward, **figures)
