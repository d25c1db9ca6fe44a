"""Instructions that a program can check, as in IFEval (Zhou et al. 2023, arXiv:2311.07911).

The ids and arguments are those of its data. Instructions about the language of an answer, or that
are not in CHECKS, give no verdict. Words and sentences are split by simple rules, so the verdict on
some prompts may differ from that of the paper's program.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from jaxpost.rewards.format import text_of

_BULLET = re.compile(r'^[^\S\n]*(?:[-*+]\s|\d+\.\s)', re.M)
_HIGHLIGHT = re.compile(r'(?<!\*)\*{1,2}[^\s*][^*\n]*\*{1,2}(?!\*)')


def ifeval(completions: list, instruction_id_list: list, kwargs: list, **columns: Any) -> list[float | None]:
  """Returns 1 where a completion follows all instructions of its row, else 0; None if one cannot be checked.

  Args:
    instruction_id_list: the ids of each row, such as 'punctuation:no_comma'.
    kwargs: for each row, a dict of arguments for each instruction.
  """
  rewards: list[float | None] = []
  for completion, ids, arguments in zip(completions, instruction_id_list, kwargs):
    if any(name not in CHECKS for name in ids):
      rewards.append(None)
      continue
    text = text_of(completion)
    # In the data, each dict has the arguments of all instructions, null unless they are its own.
    not_null = [{k: v for k, v in (values or {}).items() if v is not None} for values in arguments]
    rewards.append(float(all(CHECKS[name](text, **values) for name, values in zip(ids, not_null, strict=True))))
  return rewards


def _compare(count: int, relation: str, limit: int) -> bool:
  return count >= limit if relation == 'at least' else count < limit


def _count(word: str, text: str) -> int:
  return len(re.findall(rf'(?<!\w){re.escape(word)}(?!\w)', text, re.IGNORECASE))


def _keywords(text: str, keywords: list[str]) -> bool:
  return all(_count(word, text) for word in keywords)


def _forbidden(text: str, forbidden_words: list[str]) -> bool:
  return not any(_count(word, text) for word in forbidden_words)


def _frequency(text: str, keyword: str, frequency: int, relation: str = 'at least') -> bool:
  return _compare(_count(keyword, text), relation, frequency)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str = 'at least') -> bool:
  return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _words(text: str, num_words: int, relation: str = 'at least') -> bool:
  return _compare(len(re.findall(r'\w+', text)), relation, num_words)


def _sentences(text: str, num_sentences: int, relation: str = 'at least') -> bool:
  ended = text[: 1 + max(map(text.rfind, '.!?'))]  # without an unfinished last one, on which matching is quadratic
  return _compare(len(re.findall(r'[^.!?\s][^.!?]*[.!?]+', ended)), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
  parts = [part.strip() for part in re.split(r'\s?\*\*\*\s?', text)]
  return len(parts) == num_paragraphs and all(parts)


def _placeholders(text: str, num_placeholders: int) -> bool:
  return len(re.findall(r'\[[^\[\]]+\]', text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
  return re.search(rf'^[^\S\n]*{re.escape(postscript_marker)}', text, re.IGNORECASE | re.M) is not None


def _bullets(text: str, num_bullets: int) -> bool:
  return len(_BULLET.findall(text)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
  return len(_HIGHLIGHT.findall(text)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
  return len(re.findall(rf'\s?{re.escape(section_spliter)}\s?\d+\s?', text)) >= num_sections


def _json(text: str) -> bool:
  body = text.strip().removesuffix('```').strip()
  try:
    json.loads(re.sub('^```(?:json)?', '', body, flags=re.IGNORECASE).strip())
  except (ValueError, RecursionError):  # nested deeper than Python reads
    return False
  return True


def _title(text: str) -> bool:
  titles = (line[max(line.find('<<'), 0) : line.rfind('>>') + 2] for line in text.split('\n') if '<<' in line)
  return any(len(title) > 4 and title.strip('<> \t') for title in titles)


def _ends(text: str, end_phrase: str) -> bool:
  return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
  text = text.strip()
  return len(text) > 1 and text[0] == text[-1] == '"'


def _no_comma(text: str) -> bool:
  return ',' not in text


def _capitals(text: str, capital_frequency: int, capital_relation: str = 'at least') -> bool:
  return _compare(sum(word.isupper() for word in re.findall(r"[\w'-]+", text)), capital_relation, capital_frequency)


def _two(text: str) -> bool:
  parts = [part.strip() for part in text.split('******')]
  return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeated(text: str, prompt_to_repeat: str) -> bool:
  return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


CHECKS: dict[str, Callable[..., bool]] = {
  'keywords:existence': _keywords,
  'keywords:forbidden_words': _forbidden,
  'keywords:frequency': _frequency,
  'keywords:letter_frequency': _letters,
  'length_constraints:number_words': _words,
  'length_constraints:number_sentences': _sentences,
  'length_constraints:number_paragraphs': _paragraphs,
  'detectable_content:number_placeholders': _placeholders,
  'detectable_content:postscript': _postscript,
  'detectable_format:number_bullet_lists': _bullets,
  'detectable_format:number_highlighted_sections': _highlights,
  'detectable_format:multiple_sections': _sections,
  'detectable_format:json_format': _json,
  'detectable_format:title': _title,
  'startend:end_checker': _ends,
  'startend:quotation': _quoted,
  'punctuation:no_comma': _no_comma,
  'change_case:english_capital': str.isupper,
  'change_case:english_lowercase': str.islower,
  'change_case:capital_word_frequency': _capitals,
  'combination:two_responses': _two,
  'combination:repeat_prompt': _repeated,
}
