"""An environment with a tool, and a model that plays in it, shared by the tests of episodes.

A random model never writes a valid tool call. Tests therefore replace the parser of tool calls by `parse`, with which
every finished turn calls the tool `nth` with the number of its characters.
"""

import numpy as np
import tiny

from jaxpost.data import tokenizer
from jaxpost.formats import hf_export
from jaxpost.models import model as model_lib

ENVIRONMENT = '''
import os, time

class Env:
  """Counts what it is told."""

  def reset(self, answer, **row):
    self.told = []
    return f' [{answer}]' if int(answer) % 2 else None

  def nth(self, n: int) -> str:
    """
    Says a number.

    Args:
      n: The number.
    """
    self.told.append(n)
    if n % 3 == 0:
      raise ValueError('no such number')
    return f'it is {n}'

  def get_reward(self):
    return len(self.told) / 4 + sum(self.told) % 7 / 70
'''


def folder(path, length=5):
  """Writes a model that ends its turns often, because <|im_end|> (258) has a long embedding; returns its path."""
  shape = dict(vocab_size=259, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
  model = model_lib.build(tiny.config(**shape))
  params = tiny.params(model)
  params['embed'] = np.asarray(params['embed']) * np.where(np.arange(len(params['embed'])) == 258, length, 1)[:, None]
  hf_export.save(path, model, params)
  tokenizer.load('bytes').save(path)
  return str(path)


def parse(text, tools=()):
  """Replaces `turns.parse`: any text is one call of `nth` with its number of characters."""
  return [dict(name='nth', arguments={'n': len(text)})]


def config(model, path, **over):
  """A config of GRPO in the environment `Env` of file `path`, as nested dicts."""
  return tiny.run_config(
    model,
    **tiny.merged(
      dict(
        algorithm='grpo',
        environment=f'{path}:Env',
        data=dict(path='generated:arithmetic:max=99,ops=+,size=50,correct=1'),
        train=dict(row_length=0, steps=3),
        optim=dict(lr=1e-2),
        tools=dict(workers=3, max_turns=4, timeout_s=20.0),
        rollout=dict(prompts=4, group_size=4, max_prompt_length=48, max_new_tokens=80, slots=4, block=16),
      ),
      over,
    ),
  )
