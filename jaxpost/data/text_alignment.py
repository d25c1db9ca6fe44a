"""Tokens of two tokenizers that stand for the same text.

Two tokenizers cut a text in different places. The places where both cut divide it into spans, each of some tokens
of one tokenizer and some of the other. Legend: T tokens of a document.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxpost.data import chat

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.tokenizer import Tokenizer

_BYTE = re.compile(r'<0x([0-9A-F]{2})>')  # of SentencePiece, for what has no piece


class Span(NamedTuple):
  """Tokens of two documents with the same text: those of `mine` and of `theirs`, as half-open ranges."""

  mine: tuple[int, int]
  theirs: tuple[int, int]

  @property
  def is_pair(self) -> bool:
    """True for one token of each."""
    return all(stop - start == 1 for start, stop in self)


@dataclasses.dataclass(frozen=True)
class Bytes:
  """The text of each token of a tokenizer.

  Attributes:
    texts: UTF-8, or a part of a character; None for special tokens, and where there is no token.
    special: {special token: its id}.
    stop_ids: tokens that end a turn.
  """

  texts: list[bytes | None]
  special: dict[str, int]
  stop_ids: frozenset[int]

  @classmethod
  def of(cls, tokenizer: Tokenizer) -> Bytes:
    """Reads them from the vocabulary of a byte-level or a SentencePiece tokenizer."""
    special = {token.content: i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special}
    vocabulary = tokenizer.hf.get_vocab()
    texts: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    # They stand for space and line break; large vocabularies of SentencePiece have them as letters, beside their space.
    is_byte_level = {'Ġ', 'Ċ'} <= vocabulary.keys() and '▁' not in vocabulary
    to_bytes = _from_letters if is_byte_level else _from_piece
    for token, i in vocabulary.items():
      if token not in special:
        texts[i] = to_bytes(token)
    return cls(texts, special, frozenset(tokenizer.stop_ids))


@functools.cache
def _letters() -> dict[str, int]:
  """Returns {printable stand-in: byte} of byte-level tokenizers (GPT-2)."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _from_letters(token: str) -> bytes:
  letters = _letters()
  if all(letter in letters for letter in token):
    return bytes(letters[letter] for letter in token)
  return token.encode()  # a token that was added to the vocabulary as text


def _from_piece(token: str) -> bytes:
  if byte := _BYTE.fullmatch(token):
    return bytes([int(byte[1], 16)])
  return token.replace('▁', ' ').encode()


def same_tokens(mine: Bytes, theirs: Bytes, ends: Mapping[int, int]) -> np.ndarray:
  """Returns [size of their vocabulary] int32: the id of the same token among mine; -1 for none.

  Args:
    ends: {token at which their turns end: the one at which mine end}.
  """
  ids = {text: i for i, text in reversed(list(enumerate(mine.texts))) if text is not None}
  found = np.array([-1 if text is None else ids.get(text, -1) for text in theirs.texts], np.int32)
  for token, i in theirs.special.items():
    found[i] = mine.special.get(token, -1)
  for other, own in ends.items():
    found[other] = own
  return found


def runs(example: Example) -> list[tuple[int, int]]:
  """Returns the half-open ranges of tokens with a weight, such as the turns of the assistant."""
  weighted = np.asarray(example.loss_mask) > 0
  edges = np.flatnonzero(np.diff(np.concatenate([[False], weighted, [False]])))
  return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def spans(mine: Example, theirs: Example, texts: tuple[Bytes, Bytes]) -> Iterator[Span]:
  """Yields the spans of two renderings of one document, run by run.

  Where the texts of a run differ, as one template adds what the other does not, its spans end. A token at which the
  turn ends is a span by itself.

  Args:
    texts: of the tokens of `mine` and of `theirs`.
  """
  for pair in zip(runs(mine), runs(theirs)):
    sides = zip(pair, (mine, theirs), texts)
    pieces, stopped = zip(*(_pieces(example.tokens[slice(*run)].tolist(), known) for run, example, known in sides))
    _drop_leading_space(pieces)
    common = chat.common_length(*(b''.join(some).decode('latin-1') for some in pieces))  # a character for each byte
    # {length of the text so far: number of tokens}, for the student and for the teacher.
    ends = [dict(zip(itertools.accumulate(map(len, some)), range(1, len(some) + 1))) for some in pieces]
    begin = (0, 0)
    for cut in sorted(set(ends[0]) & set(ends[1])):
      if cut > common:
        break
      here = ends[0][cut], ends[1][cut]
      if cut:
        yield _span(pair, begin, here)
      begin = here
    if all(stopped) and begin == tuple(map(len, pieces)):
      yield _span(pair, begin, (begin[0] + 1, begin[1] + 1))


def _pieces(ids: list[int], known: Bytes) -> tuple[list[bytes], bool]:
  """Returns (the text of each token of a run before its end, whether a stop token ends it)."""
  stopped = bool(ids) and ids[-1] in known.stop_ids
  return [known.texts[i] or b'' for i in (ids[:-1] if stopped else ids)], stopped


def _span(pair: Sequence[tuple[int, int]], begin: tuple[int, int], end: tuple[int, int]) -> Span:
  return Span(*((first + a, first + b) for (first, _), a, b in zip(pair, begin, end)))


def _drop_leading_space(whole: Sequence[list[bytes]]) -> None:
  """Drops the space that SentencePiece puts before a text, where the other has none."""
  leads = [b''.join(pieces).startswith(b' ') for pieces in whole]
  for pieces, lead, other in zip(whole, leads, reversed(leads)):
    if lead and not other:
      first = next(n for n, piece in enumerate(pieces) if piece)
      pieces[first] = pieces[first][1:]
