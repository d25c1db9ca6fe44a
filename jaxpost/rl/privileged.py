"""Prompts that tell a teacher more than the student sees, for self-distillation.

OPSD (arXiv:2601.18734) and SDPO (arXiv:2601.20802): the policy samples from the prompt, and
the same model, given a solution or feedback as well, grades every token. The column
`config.rl.privileged` of the data has the whole prompt of the teacher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpost.data import prompts as prompts_lib
from jaxpost.errors import InputError
from jaxpost.types import Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer


def rollout_of_teacher(rollout: Rollout, config: Any, tokenizer: Tokenizer) -> Rollout:
  """Returns the rollout with the prompts of the teacher; its completions are the same tokens.

  Raises:
    InputError: a row has no such prompt, or one that is too long for a row of a batch.
  """
  name, longest = config.rl.privileged, config.rollout.max_prompt_length
  prompts = []
  for prompt in rollout.prompts:
    where = f'prompt {prompt.index}'
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
    prompts.append(prompt.replace(tokens=tokens))
  return rollout.replace(prompts=tuple(prompts))
