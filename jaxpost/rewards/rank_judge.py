"""The reward of an LLM judge that ranks the completions of a group against each other.

One request to URL/chat/completions shows all completions of a prompt, and the judge answers with their order. A
judge may prefer the first answers, so each group is shown in several orders and the places are averaged.
`launch.serve` serves an engine of this library at such a URL.

Legend: G completions of a group, D of them distinct.
"""

from __future__ import annotations

import concurrent.futures
import functools
import re
import time
from collections.abc import Callable, Sequence

from jaxpost.errors import refuse
from jaxpost.rewards import judge
from jaxpost.rewards.format import text_of
from jaxpost.workers import call

TEMPLATE = """You compare answers of an assistant to one request.

The request:
{prompt}

{answers}

Which answer is the most correct, complete and helpful? Reason briefly, then end with one line that orders all
{count} numbers from best to worst, such as "Ranking: 2 > 1 = 3", where = means equally good."""
_RANKING = r'(?i)ranking[\s:*"]{1,6}([\d\s>=]+)'


class RankJudge(judge.Judge):
  """The place of a completion in the judge's order of its group: 1 for the best, 0 for the worst, ties get their mean.

  Args:
    url, model, api_key_env, timeout, retries, parallel, temperature, max_tokens, pause: as for `judge`.
    template: a text file in which {prompt}, {answers}, {count} and any column name in braces are replaced.
    orders: how often a group is shown, each time in another order.
  """

  def __init__(
    self,
    url: str,
    model: str,
    template: str = '',
    orders: int = 2,
    api_key_env: str = '',
    timeout: float = 60.0,
    retries: int = 3,
    parallel: int = 8,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    pause: float = 0.5,
  ) -> None:
    super().__init__(
      url,
      model,
      score=_RANKING,
      api_key_env=api_key_env,
      timeout=timeout,
      retries=retries,
      parallel=parallel,
      temperature=temperature,
      max_tokens=max_tokens,
      pause=pause,
    )
    refuse(orders < 1, f'option orders={orders}: must be at least 1')
    self._orders = orders
    self._template = judge.read_template(template, 'answers') if template else TEMPLATE
    self.needs_columns = self.columns_of('prompt', 'answers', 'count')

  def __call__(
    self,
    prompts: list,
    completions: list,
    time_limit_s: float | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns,
  ) -> list[float | None]:
    """Returns one reward per completion, None for all if no order was given; RewardError if no request was answered."""
    texts = [text_of(completion) for completion in completions]
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < 2:
      return [0.5] * len(texts)
    first = {name: columns[name][0] for name in self.needs_columns}
    orders = _orders(len(distinct), self._orders)
    deadline = time.monotonic() + (0.9 * time_limit_s if time_limit_s else float('inf'))
    with concurrent.futures.ThreadPoolExecutor(self._parallel) as threads:
      verdicts = list(threads.map(functools.partial(self._rank, prompts[0], distinct, first, deadline), orders))
    errors = [v.error for v in verdicts if v.error]
    if len(errors) == len(verdicts):
      raise call.RewardError(f'no request was answered: {errors[-1]}')
    rankings = [v.score for v in verdicts if v.score is not None]
    if log_metric:
      log_metric('rank_judge_without_ranking', 1 - len(rankings) / len(verdicts))
      if len(rankings) > 1:
        log_metric('rank_judge_agreement', _agreement(rankings))
    if not rankings:
      return [None] * len(texts)
    means = {text: sum(scores[n] for scores in rankings) / len(rankings) for n, text in enumerate(distinct)}
    return [means[text] for text in texts]

  def _rank(
    self, prompt: str | list[dict], texts: Sequence[str], columns: dict, deadline: float, order: Sequence[int]
  ) -> judge.Verdict:
    """Shows the texts in this order and asks for their ranking; the verdict has a score for each, in list order."""
    answers = '\n\n'.join(f'Answer {place}:\n{texts[n]}' for place, n in enumerate(order, 1))
    text = self.fill({'prompt': judge.prompt_text(prompt), 'answers': answers, 'count': len(order), **columns})
    return self.ask(text, deadline, functools.partial(self._read_ranking, order))

  def _read_ranking(self, order: Sequence[int], reply: str) -> list[float] | None:
    """Returns the score of each text, or None unless the reply orders all of them."""
    matches = list(self._score.finditer(reply))
    tiers = [re.findall(r'\d+', tier) for tier in matches[-1][1].split('>')] if matches else []
    named = [int(number) for tier in tiers for number in tier]
    if sorted(named) != list(range(1, len(order) + 1)) or not all(tiers):
      return None
    scores = [0.0] * len(order)
    num_ranked = 0
    for tier in tiers:
      place = num_ranked + (len(tier) - 1) / 2  # the mean place of a tie, from 0
      for number in tier:
        scores[order[int(number) - 1]] = 1 - place / (len(order) - 1)
      num_ranked += len(tier)
    return scores


def _orders(size: int, count: int) -> list[list[int]]:
  """Returns `count` orders of 0 ... size - 1: ascending, descending, then both rotated further and further."""
  orders = []
  for k in range(count):
    start = (k // 2) * size // max(1, (count + 1) // 2)
    order = [(start + n) % size for n in range(size)]
    orders.append(order[::-1] if k % 2 else order)
  return orders


def _agreement(rankings: Sequence[Sequence[float]]) -> float:
  """Returns the fraction of pairs of texts that the first two rankings order in the same way."""
  first, second = rankings[:2]
  pairs = [(i, j) for i in range(len(first)) for j in range(i)]
  return sum(_sign(first[i] - first[j]) == _sign(second[i] - second[j]) for i, j in pairs) / len(pairs)


def _sign(x: float) -> int:
  return (x > 0) - (x < 0)
