"""The teachers of `opd`: what they read, and how several of them stand for one reference.

With `config.rl.privileged` a teacher reads a prompt that tells it more than the student sees, for self-distillation:
OPSD (arXiv:2601.18734) and SDPO (arXiv:2601.20802). The policy samples from its own prompt, and the same model, given a
solution or feedback as well, grades every token.

Each of several teachers scores the whole rollout, as a reference does. The result is the sum of their
log-probs, weighted by `distill.weights`, so that its distance from the policy is the k1 estimate of
sum_i w_i KL(student, teacher_i), the loss of `gkd` with beta = 1. A source of `rl.sources`
may have some of the teachers only; their weights then sum to 1 for its prompts.

Legend: N sequences, G samples a prompt, K teachers, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpost.data import prompts as prompts_lib
from jaxpost.errors import InputError
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer


def privileged_rollout(rollout: Rollout, config: Any, tokenizer: Tokenizer) -> Rollout:
  """Returns the rollout with the prompts that `seen_by_teacher` makes; its completions are the same tokens."""
  return rollout.replace(prompts=tuple(seen_by_teacher(prompt, config, tokenizer) for prompt in rollout.prompts))


def seen_by_teacher(prompt: Prompt, config: Any, tokenizer: Tokenizer) -> Prompt:
  """Returns the prompt with the tokens of its column `config.rl.privileged`; InputError if it has none or too many."""
  name, longest, where = config.rl.privileged, config.rollout.max_prompt_length, f'prompt {prompt.index}'
  if prompt.columns.get(name) is None:
    raise InputError(f'config.rl.privileged: {where} has no column {name!r}; known: {", ".join(prompt.columns)}')
  row = {**prompt.columns, 'prompt': prompt.columns[name]}
  seen = prompts_lib.prompt_of(row, where, '' if isinstance(row['prompt'], str) else config.data.system_prompt)
  tokens = prompts_lib.encode_prompt(tokenizer, seen, row, where)
  if len(tokens) > longest:
    raise InputError(
      f'config.rl.privileged: the prompt of the teacher at {where} has {len(tokens)} tokens; raise '
      f'config.rollout.max_prompt_length={longest}'
    )
  return prompt.replace(tokens=tokens)


def weights(rollout: Rollout, config: Any) -> np.ndarray:
  """Returns the weight of each teacher for each sequence, [N, K] float64; rows sum to 1."""
  every = np.asarray(config.distill.weights or (1.0,) * len(config.distill.teachers), np.float64)
  table = np.zeros((len(rollout.prompts), len(every)))
  for row, prompt in zip(table, rollout.prompts):
    chosen = list(prompt.source.get('teachers', range(len(every))))
    row[chosen] = every[chosen] / every[chosen].sum()
  return np.repeat(table, len(rollout.lengths) // len(rollout.prompts), axis=0)


def combine(logprobs: Sequence[np.ndarray], rollout: Rollout, config: Any) -> np.ndarray:
  """Returns the weighted sum [N, C] float32 of the log-probs [N, C] of the K teachers."""
  shares = weights(rollout, config)
  return np.asarray(sum(share[:, None] * x for share, x in zip(shares.T, logprobs, strict=True)), np.float32)
