"""Suites of `launch.evaluate --suite`: known data sets from local files, with their prompts and grading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpost.errors import InputError, did_you_mean
from jaxpost.tools import choices, completions, score_dataset
from jaxpost.tools.completions import Draws
from jaxpost.tools.working import working

if TYPE_CHECKING:
  from jaxpost.tools.inference import Weights


class Suite(NamedTuple):
  """How the questions of a data set are asked and graded.

  columns: required in its rows. reward: the function that grades samples; '' compares log-probs of choices. map: makes
  prompts from rows. letters: score letters of the choices, not their texts. help: what counts as correct.
  """

  columns: tuple[str, ...]
  reward: str = ''
  map: str = ''
  letters: bool = False
  help: str = ''


SUITES = {
  'gsm8k': Suite(('question', 'answer'), 'gsm8k', 'jaxpost.data.maps:gsm8k', help='the number after ####, or boxed'),
  'math500': Suite(('problem', 'answer'), 'math_verify', 'jaxpost.data.maps:math', help='the boxed answer'),
  'ifeval': Suite(
    ('instruction_id_list', 'kwargs'),
    'ifeval',
    'jaxpost.data.maps:as_chat',
    help='all instructions of a prompt are followed',
  ),
  'mmlu': Suite(('question', 'choices', 'answer'), letters=True, help='the letter with the largest log-prob'),
  'choices': Suite(('question', 'choices', 'answer'), help='the text with the largest log-prob'),
}


def find(name: str) -> Suite:
  """Returns the suite of a name; InputError, which names the nearest one, if there is none."""
  if name not in SUITES:
    raise InputError(f'--suite: there is no {name!r}; {did_you_mean(name, SUITES)}known: {", ".join(SUITES)}')
  return SUITES[name]


def measure(
  name: str,
  weights: Weights,
  data: str,
  out: str,
  draws: Draws,
  *,
  size: int = 0,
  mesh: str = 'data=-1',
  source: str = '',
) -> dict[str, Any]:
  """Evaluates a suite; see `score_dataset.measure` and `choices.measure` for the figures.

  Args:
    data: a file or another source of rows, as config.data.path. size: largest number of rows; 0: all.
    out: folder for completions and grades of suites that sample; '' keeps none.
  """
  suite = find(name)
  _check_columns(name, suite, data)
  rows = completions.read_whole(data, map_fn=suite.map)
  count = min(size or len(rows), len(rows))
  if suite.reward:
    options = dict(grading=score_dataset.Grading(), mesh=mesh, source=source)
    figures = score_dataset.measure(weights, rows[:count], suite.reward, out, draws, **options)
  else:
    questions = [choices.question(rows[i], rows.where(i), suite.letters) for i in range(count)]
    with working(f'scoring the choices of {count} questions'):
      figures = choices.measure(weights, questions)
  return dict(suite=name, data=data, **figures)


def _check_columns(name: str, suite: Suite, data: str) -> None:
  """Raises InputError if the first row lacks a column."""
  first = completions.read_whole(data)[0]
  mapped = name in ('gsm8k', 'math500') and 'prompt' in first  # as in training data
  missing = [column for column in suite.columns if column not in first and not mapped]
  if missing:
    raise InputError(f'--suite={name}: {data}: rows lack {", ".join(missing)}; docs/sampling.md has the columns')
