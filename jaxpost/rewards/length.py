"""Rewards for the length of a completion, and for repetition.

Lengths are numbers of tokens in `completion_ids`, including the stop token.
"""

import math
from collections.abc import Callable

from jaxpost.errors import InputError
from jaxpost.rewards import math as answers


class Length:
  """1 at `target` tokens, falling linearly to 0 at `max` tokens and at zero tokens.

  With target=0 the reward of n tokens is 1 - n / max: shorter is better. Beyond `max` it is 0.
  """

  def __init__(self, max: int, target: int = 0) -> None:
    if not 0 <= target < max:
      raise InputError(f'options target={target} and max={max}: want 0 <= target < max')
    self._max, self._target = max, target

  def __call__(self, completion_ids: list[list[int]], **columns) -> list[float]:
    """Returns one reward per completion."""
    return [self._reward(len(ids)) for ids in completion_ids]

  def _reward(self, tokens: int) -> float:
    if tokens < self._target:
      return tokens / self._target
    return max(0.0, (self._max - tokens) / (self._max - self._target))


class Overlong:
  """Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).

  0 up to max - buffer tokens, then linearly down to -factor at `max` tokens, and -factor beyond. `max` is usually
  `config.rollout.max_new_tokens`.
  """

  def __init__(self, max: int, buffer: int = 0, factor: float = 1.0) -> None:
    if max < 1 or not 0 <= buffer <= max or factor < 0:
      raise InputError(
        f'options max={max}, buffer={buffer}, factor={factor:g}: want 1 <= max, 0 <= buffer <= max and 0 <= factor'
      )
    self._free, self._max = max - buffer, max
    self._factor = factor

  def __call__(self, completion_ids: list[list[int]], **columns) -> list[float]:
    """Returns one reward per completion."""
    return [self._reward(len(ids)) for ids in completion_ids]

  def _reward(self, tokens: int) -> float:
    if tokens <= self._free:
      return 0.0
    if tokens > self._max:
      return -self._factor
    return self._factor * (self._free - tokens) / (self._max - self._free)


class Repetition:
  """Repetition penalty: penalty * (1 - distinct n-grams / n-grams) of the tokens.

  Yeo et al. 2025 (arXiv:2502.03373), appendix C.2. 0 for a completion shorter than one n-gram.
  """

  def __init__(self, ngram: int = 3, penalty: float = -1.0) -> None:
    if ngram < 1 or penalty > 0:
      raise InputError(f'options ngram={ngram}, penalty={penalty:g}: want 1 <= ngram and penalty <= 0')
    self._ngram, self._penalty = ngram, penalty

  def __call__(self, completion_ids: list[list[int]], **columns) -> list[float]:
    """Returns one reward per completion."""
    return [self._reward(ids) for ids in completion_ids]

  def _reward(self, ids: list[int]) -> float:
    grams = list(zip(*(ids[i:] for i in range(self._ngram))))
    if not grams:
      return 0.0
    return self._penalty * (1 - len(set(grams)) / len(grams))


_BY: dict[str, Callable[[], Callable[..., list]]] = {
  'exact_match': lambda: answers.exact_match,
  'numeric_match': lambda: answers.numeric_match,
  'gsm8k': lambda: answers.gsm8k,
  'math_verify': answers.MathVerify,
}


class CosineLength:
  """Correctness, scaled by length along a cosine: Yeo et al. 2025 (arXiv:2502.03373), appendix C.1.

  The reward of a right completion falls from max_right (zero tokens) to min_right (`max` tokens). That of a wrong one
  rises from min_wrong to max_wrong. None if the row's answer cannot be read.

  Args:
    max: length from which the reward is constant.
    by: name of the reward that decides whether a completion is right.
    min_wrong: reward of a wrong completion of no tokens.
    max_wrong: reward of a wrong completion of `max` tokens.
    min_right: reward of a right completion of `max` tokens.
    max_right: reward of a right completion of no tokens.
  """

  def __init__(
    self,
    max: int,
    by: str = 'math_verify',
    min_wrong: float = -1.0,
    max_wrong: float = -0.5,
    min_right: float = 0.5,
    max_right: float = 1.0,
  ) -> None:
    if max < 1:
      raise InputError(f'option max={max} is less than 1')
    if by not in _BY:
      raise InputError(f'option by={by!r} is not one of {", ".join(_BY)}')
    self._max = max
    self._is_right = _BY[by]()
    self._ends = {True: (max_right, min_right), False: (min_wrong, max_wrong)}  # at 0 and at `max` tokens

  def __call__(
    self,
    completions: list,
    completion_ids: list[list[int]],
    answer: list,
    time_limit_s: float | None = None,
    log_metric: Callable | None = None,
    **columns,
  ) -> list[float | None]:
    """Returns one reward per completion."""
    options = dict(time_limit_s=time_limit_s, log_metric=log_metric)  # functions that do not name them take **columns
    verdicts = self._is_right(completions=completions, answer=answer, **options)
    return [
      None if verdict is None else self._reward(verdict == 1, len(ids))
      for verdict, ids in zip(verdicts, completion_ids, strict=True)
    ]

  def _reward(self, right: bool, tokens: int) -> float:
    first, last = self._ends[right]
    fraction = min(tokens / self._max, 1.0)
    return last + (first - last) * (1 + math.cos(math.pi * fraction)) / 2
