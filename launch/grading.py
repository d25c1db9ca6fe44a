"""Measures the suite or the reward that `launch.evaluate` names by --suite or --reward."""

from __future__ import annotations

from typing import Any

from absl import flags

from . import exits, model_flags, sampling_flags


def measure(given: model_flags.ModelFlags, sampling: sampling_flags.SamplingFlags) -> dict[str, Any]:
  """Returns the figures of a suite, or pass@k and the like of samples graded by --reward."""
  with model_flags.starting():
    from jaxpost.tools import completions, inference, score_dataset, suites

  value = flags.FLAGS
  if value.suite and not suites.find(value.suite).reward:  # before weights are read
    exits.refuse(('out', *sampling._fields), f'with --suite={value.suite}, which compares log-probs of the choices')
  weights = inference.load(**given.arguments())
  draws = completions.Draws(**sampling.arguments())
  more = dict(mesh=value.mesh, source=given.name)
  if value.suite:
    return suites.measure(value.suite, weights, value.data, value.out, draws, size=value.size or 0, **more)
  rows = score_dataset.read(value.data, value.columns, value.map, value.size)
  if isinstance(rows[0].get('prompt'), str) and weights.inputs.tokenizer.chat_template:
    inference.to_stderr(
      f'{value.data}: its prompts are plain text and are continued as they are, as in training; for messages in the'
      ' chat template, --map=jaxpost.data.maps:as_chat'
    )
  found = score_dataset.measure(
    weights, rows, value.reward, value.out, draws, pass_reward=value.pass_reward, correct_by=value.correct_by, **more
  )
  return dict(data=value.data, graded_by=value.reward, **found)
