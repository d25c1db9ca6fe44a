"""Rewards for the form of a completion.

A reward is `f(prompts, completions, completion_ids, **columns)`. It names the arguments that it needs and returns one
number per completion, or None for no verdict. A reward that is a class is instantiated once, with the options of its
spec.
"""

import json
import re
import sys
from collections.abc import Callable

from jaxpost.errors import InputError
from jaxpost.rewards import bounded
from jaxpost.workers import call


def text_of(completion: str | list[dict]) -> str:
  """Returns the text of a completion, which is a string or messages [{'role', 'content'}].

  Of several messages (tool calls before the answer) it is the text of the model's last one, never that of a tool.
  """
  if isinstance(completion, str):
    return completion
  turns = [message for message in completion if message.get('role', 'assistant') == 'assistant']
  return content_text(turns[-1]['content']) if turns else ''


def content_text(content: str | list[dict] | None) -> str:
  """Returns the content of a message as text; of content in parts, the text parts."""
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  return ''.join(part.get('text', '') for part in content)


def think_format(completions: list, **columns) -> list[float]:
  """Returns 1 for '<think>reasoning</think>answer', one <think> only, else 0."""
  del columns
  return [float(_thinks(text_of(c))) for c in completions]


def _thinks(text: str) -> bool:
  rest = text.removeprefix('<think>')
  return rest != text and '<think>' not in rest and '</think>' in rest


class TagFormat:
  """1 for '<think>..</think> <answer>..</answer>' with nothing around it, else 0.

  Each tag must appear once, in this order, with only whitespace between them: the format reward of DeepSeek-R1
  (arXiv:2501.12948, section 2.2.2).

  Args:
    tags: the names, joined with +.
  """

  def __init__(self, tags: str = 'think+answer') -> None:
    names = tags.split('+')
    for name in names:
      if not re.fullmatch(r'[\w.-]+', name) or names.count(name) > 1:
        raise InputError(f'option tags={tags!r} must be different names joined with +')
    self._marks = re.compile('|'.join(f'</?{re.escape(n)}>' for n in names))
    self._sequence = [m for n in names for m in (f'<{n}>', f'</{n}>')]

  def __call__(self, completions: list, **columns) -> list[float]:
    """Returns one reward per completion."""
    return [float(self._fits(text_of(c).strip())) for c in completions]

  def _fits(self, text: str) -> bool:
    marks = list(self._marks.finditer(text))
    if [m[0] for m in marks] != self._sequence:
      return False
    # The text before, between and after the pairs of tags must be blank.
    ends = [0, *(m.end() for m in marks[1::2])]
    starts = [*(m.start() for m in marks[::2]), len(text)]
    return all(not text[i:j].strip() for i, j in zip(ends, starts))


class RegexMatch:
  """1 if a pattern of Python's re is found in the completion, else 0.

  A completion on which the pattern backtracks for seconds gets 0, and counts in `regex_match_late`.

  Args:
    pattern: the pattern. Without it each row has its own, in the column `pattern`; None for a row whose pattern is
      missing or invalid.
    full: the pattern must match the whole completion.
  """

  def __init__(self, pattern: str | None = None, full: bool = False) -> None:
    self._pattern = None
    self._search = re.fullmatch if full else re.search
    self.needs_columns = ('pattern',) if pattern is None else ()
    if pattern is not None:
      try:
        self._pattern = re.compile(pattern)
      except re.error as error:
        raise InputError(f'option pattern={pattern!r}: {error}') from error
    self._bounded = bounded.Bounded(self._reward)

  def __call__(
    self,
    completions: list,
    pattern: list | None = None,
    time_limit_s: float | None = None,
    log_metric: Callable | None = None,
    **columns,
  ) -> list[float | None]:
    """Returns one reward per completion."""
    rows = [(text_of(c), p) for c, p in zip(completions, pattern or [None] * len(completions), strict=True)]
    return bounded.scores(self._bounded, rows, 'regex_match_late', time_limit_s, log_metric)

  def _reward(self, text: str, pattern: str) -> float | None:
    try:
      return float(self._search(self._pattern or pattern, text) is not None)
    except (re.error, TypeError):  # The row's pattern is invalid; that is no verdict on the completion.
      return None


class JsonSchema:
  """1 if the completion is JSON that fits a JSON schema, else 0.

  The completion must be the JSON alone, or one fenced block. References to other documents are never fetched. A
  completion that takes seconds to check gets 0, and counts in `json_schema_late`.

  Args:
    file: file of the schema. Without it each row has its own, in the column `schema` (an object or its text); None for
      a row whose schema is invalid.
  """

  def __init__(self, file: str | None = None) -> None:
    _jsonschema()
    self._validator = None
    self.needs_columns = ('schema',) if file is None else ()
    if file is not None:
      try:
        with open(file, encoding='utf-8') as opened:
          self._validator = _validator(json.load(opened))
      except (OSError, ValueError) as error:
        raise InputError(f'option file={file!r}: {error}') from error
      if self._validator is None:
        raise InputError(f'option file={file!r}: is no valid JSON schema')
    self._bounded = bounded.Bounded(self._fits)

  def __call__(
    self,
    completions: list,
    schema: list | None = None,
    time_limit_s: float | None = None,
    log_metric: Callable | None = None,
    **columns,
  ) -> list[float | None]:
    """Returns one reward per completion."""
    rows = [(text_of(c), s) for c, s in zip(completions, schema or [None] * len(completions), strict=True)]
    return bounded.scores(self._bounded, rows, 'json_schema_late', time_limit_s, log_metric)

  def _fits(self, text: str, schema: object) -> float | None:
    validator = _validator(schema) if self._validator is None else self._validator
    if validator is None:
      return None
    try:
      value = json.loads(_unfenced(text), parse_constant=_no_constant)
    except (ValueError, RecursionError):
      return 0.0
    try:
      return float(validator.is_valid(value))
    except (RecursionError, OverflowError):  # nested deeper than Python's stack, or a number that is no float
      return 0.0
    except sys.modules['referencing'].exceptions.Unresolvable as error:
      raise call.RewardError(f'the schema refers to {error}') from error


def _validator(schema):
  """Returns a jsonschema validator, or None if the schema is invalid."""
  jsonschema, referencing = _jsonschema()
  try:
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, (dict, bool)):
      return None
    validator_class = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator_class.check_schema(schema)
  except (ValueError, jsonschema.SchemaError):
    return None
  # An empty registry makes references errors; the default one would fetch them by URL.
  return validator_class(schema, registry=referencing.Registry())


def _jsonschema():
  """Returns the modules jsonschema and referencing; InputError if they are not installed."""
  try:
    import jsonschema
    import referencing
  except ModuleNotFoundError as error:
    raise InputError(f"imports {error.name!r}, which is not installed; pip install -e '.[rewards]'") from error
  return jsonschema, referencing


def _unfenced(text: str) -> str:
  """Returns the content of a text that is one fenced block, else the text."""
  first, _, rest = text.strip().partition('\n')
  inside, _, last = rest.rpartition('\n')
  return inside if re.fullmatch(r'```\w*\s*', first) and last.strip() == '```' else text


def _no_constant(name: str) -> None:
  """Refuses NaN and Infinity, which Python's parser would accept."""
  raise ValueError(f'{name} is not JSON')
