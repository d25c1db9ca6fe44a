"""Rewards for how long a completion is, in tokens, and for repeating itself.

Lengths are those of `completion_ids`, the stop token included.
"""

import math

from jaxpost.errors import InputError
from jaxpost.rewards import math as answers


class Length:
  """1 at `target` tokens, falling linearly to 0 at `max` and at no token.

  With target=0 it is 1 - n / max: shorter is better. Beyond max it is 0.
  """

  def __init__(self, max: int, target: int = 0):
    if not 0 <= target < max:
      raise InputError(f'options target={target} and max={max}: want 0 <= target < max')
    self._max, self._target = max, target

  def __call__(self, completion_ids, **columns):
    return [self._reward(len(ids)) for ids in completion_ids]

  def _reward(self, tokens):
    if tokens < self._target:
      return tokens / self._target
    return max(0.0, (self._max - tokens) / (self._max - self._target))


class Overlong:
  """Soft punishment of length, eq. 13 of DAPO (arXiv:2503.14476).

  0 up to max - buffer tokens, from there linearly down to -factor at `max`,
  and -factor beyond it. `max` is rollout.max_new_tokens, as a rule.
  """

  def __init__(self, max: int, buffer: int = 0, factor: float = 1.0):
    if max < 1 or not 0 <= buffer <= max or factor < 0:
      raise InputError(
        f'options max={max}, buffer={buffer}, factor={factor:g}: want 1 <= max, 0 <= buffer <= max and 0 <= factor'
      )
    self._free, self._max = max - buffer, max
    self._factor = factor

  def __call__(self, completion_ids, **columns):
    return [self._reward(len(ids)) for ids in completion_ids]

  def _reward(self, tokens):
    if tokens <= self._free:
      return 0.0
    if tokens > self._max:
      return -self._factor
    return self._factor * (self._free - tokens) / (self._max - self._free)


class Repetition:
  """penalty * (1 - different n-grams / n-grams) of the tokens.

  Yeo et al. 2025 (arXiv:2502.03373), appendix C.2; 0 for less than one n-gram.
  """

  def __init__(self, ngram: int = 3, penalty: float = -1.0):
    if ngram < 1 or penalty > 0:
      raise InputError(f'options ngram={ngram}, penalty={penalty:g}: want 1 <= ngram and penalty <= 0')
    self._ngram, self._penalty = ngram, penalty

  def __call__(self, completion_ids, **columns):
    return [self._reward(ids) for ids in completion_ids]

  def _reward(self, ids):
    grams = list(zip(*(ids[i:] for i in range(self._ngram))))
    if not grams:
      return 0.0
    return self._penalty * (1 - len(set(grams)) / len(grams))


_BY = {
  'exact_match': lambda: answers.exact_match,
  'numeric_match': lambda: answers.numeric_match,
  'gsm8k': lambda: answers.gsm8k,
  'math_verify': answers.MathVerify,
}


class CosineLength:
  """Right or wrong, scaled by length along a cosine.

  A right completion falls from max_right (no token) to min_right (`max`
  tokens), a wrong one rises from min_wrong to max_wrong; None where the answer
  cannot be read. Yeo et al. 2025 (arXiv:2502.03373), appendix C.1. `by` names
  the reward that decides.
  """

  def __init__(
    self,
    max: int,
    by: str = 'math_verify',
    min_wrong: float = -1.0,
    max_wrong: float = -0.5,
    min_right: float = 0.5,
    max_right: float = 1.0,
  ):
    if max < 1:
      raise InputError(f'option max={max} is less than 1')
    if by not in _BY:
      raise InputError(f'option by={by!r} is not one of {", ".join(_BY)}')
    self._max, self._right = max, _BY[by]()
    self._ends = {True: (max_right, min_right), False: (min_wrong, max_wrong)}

  def __call__(self, completions, completion_ids, answer, **columns):
    rights = self._right(completions=completions, answer=answer)
    return [
      None if right is None else self._reward(right == 1, len(ids))
      for right, ids in zip(rights, completion_ids, strict=True)
    ]

  def _reward(self, right, tokens):
    first, last = self._ends[right]
    share = min(tokens / self._max, 1.0)
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2
