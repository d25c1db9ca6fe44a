"""The teachers of `opd`: the prompts that they read, and the weighted sum of their log-probs.

With `config.rl.privileged` a teacher reads a prompt with more information than that of the student, for
self-distillation: OPSD (arXiv:2601.18734) and SDPO (arXiv:2601.20802). The policy samples from its own prompt, and the
same model, given a solution or feedback as well, grades every token.

Each of several teachers scores the whole rollout, as a reference does. The sum of their log-probs,
weighted by `distill.weights`, less the log-probs of the policy is minus the k1 estimate of
sum_i w_i KL(student, teacher_i), the loss of `gkd` with beta = 1. A source of `rl.sources`
may have some of the teachers only; their weights then sum to 1 for its prompts.

With `config.distill.align=text` each teacher reads the prompts and the completions in its own tokens, see
`teacher_text.TextTeacher`.

Legend: N sequences, G samples a prompt, K teachers, C completion tokens, C' those of a teacher's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.data import prompts as prompts_lib
from jaxpost.errors import InputError, refuse
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer


def readings(rollout: Rollout, teachers: Sequence[Any], config: Any, tokenizer: Tokenizer) -> list[Rollout]:
  """Returns the rollout as all teachers read it or, with `distill.align=text`, as each of `teachers` does.

  Args:
    tokenizer: the student's.
  """
  if config.rl.privileged:
    rollout = privileged_rollout(rollout, config, tokenizer)
  if config.distill.align == 'text':
    return [teacher.reading(rollout) for teacher in teachers]
  return [rollout]


def scores(
  logprobs: Sequence[np.ndarray],
  pending: Any,
  teachers: Sequence[Any],
  of_student: Mapping[str, np.ndarray],
  config: Any,
) -> dict[str, np.ndarray]:
  """Returns the scores that all teachers give together: `ref_logprobs` and, with texts, `aligned`, [N, C] each.

  Args:
    logprobs: [N, C] of the tokens that each teacher has read; with texts [N, C'].
    pending: the rollout and what the teachers read, a `rl.scoring.PendingScores`.
    of_student: the student's scores [N, C]; texts need `old_logprobs`.
  """
  rollout = pending.rollout
  if config.distill.align != 'text':
    return {'ref_logprobs': combine(logprobs, rollout, config)}
  parts = [
    teacher.align(rollout, reading, x, of_student['old_logprobs'])
    for teacher, reading, x in zip(teachers, pending.readings, logprobs, strict=True)
  ]
  return {name: combine(x, rollout, config) for name, x in zip(('ref_logprobs', 'aligned'), zip(*parts))}


def privileged_rollout(rollout: Rollout, config: Any, tokenizer: Tokenizer) -> Rollout:
  """Returns the rollout with the prompts of `teacher_prompt`; its completions are the same tokens."""
  return rollout.replace(prompts=tuple(teacher_prompt(prompt, config, tokenizer) for prompt in rollout.prompts))


def teacher_prompt(prompt: Prompt, config: Any, tokenizer: Tokenizer) -> Prompt:
  """Returns the prompt in its column `config.rl.privileged`; InputError if there is none, or it has too many tokens."""
  name, max_length = config.rl.privileged, config.rollout.max_prompt_length
  where = f'prompt {prompt.index}'
  if prompt.columns.get(name) is None:
    raise InputError(f'config.rl.privileged: {where} has no column {name!r}; known: {", ".join(prompt.columns)}')
  row = {**prompt.columns, 'prompt': prompt.columns[name]}
  system_prompt = '' if isinstance(row['prompt'], str) else config.data.system_prompt
  text = prompts_lib.prompt_of(row, where, system_prompt)
  tokens = prompts_lib.encode_prompt(tokenizer, text, row, where)
  if len(tokens) > max_length:
    raise InputError(
      f'config.rl.privileged: the prompt of the teacher at {where} has {len(tokens)} tokens; raise '
      f'config.rollout.max_prompt_length={max_length}'
    )
  return prompt.replace(tokens=tokens, prompt=text)


def of_source(key: str, text: str, config: Any) -> list[int]:
  """Returns the positions in `config.distill.teachers` that the option `teachers` of a source of prompts names.

  Args:
    key: names the source, for errors.
    text: positions joined by '+'.
  """
  teachers, weights = config.distill.teachers, config.distill.weights
  refuse(
    config.rl.kl_in != 'advantage' or not teachers,
    f'{key}: teachers are those of algorithm=opd; name them in config.distill.teachers',
  )
  numbers = text.split('+')
  for number in numbers:
    refuse(
      number not in map(str, range(len(teachers))) or numbers.count(number) > 1,
      f'{key}: teachers={text!r} must be positions in config.distill.teachers, from 0 to {len(teachers) - 1}, '
      'each once, joined by +',
    )
  positions = [int(number) for number in numbers]
  refuse(
    bool(weights) and not sum(weights[i] for i in positions),
    f'{key}: config.distill.weights are 0 for teachers={text!r}; raise one of them',
  )
  return positions


def weights(rollout: Rollout, config: Any) -> np.ndarray:
  """Returns the weight of each teacher for each sequence, [N, K] float64; rows sum to 1."""
  all_weights = np.asarray(config.distill.weights or (1.0,) * len(config.distill.teachers), np.float64)
  table = np.zeros((len(rollout.prompts), len(all_weights)))
  for row, prompt in zip(table, rollout.prompts):
    indices = list(prompt.source.get('teachers', range(len(all_weights))))
    row[indices] = all_weights[indices] / all_weights[indices].sum()
  return np.repeat(table, rollout.group_size, axis=0)


def combine(logprobs: Sequence[np.ndarray], rollout: Rollout, config: Any) -> np.ndarray:
  """Returns the weighted sum [N, C] float32 of the log-probs [N, C] of the K teachers."""
  shares = weights(rollout, config)
  return np.asarray(sum(share[:, None] * x for share, x in zip(shares.T, logprobs, strict=True)), np.float32)
