"""Aligns the tokens of two tokenizers by the text that they stand for.

Two tokenizers cut a text in different places. The places where both cut divide the text into spans, each of which is
one or more tokens of either tokenizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpost.data import chat
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.data.tokenizer import Tokenizer

if TYPE_CHECKING:
  from jaxpost.data.examples import Example

_BYTE = re.compile(r'<0x([0-9A-F]{2})>')  # SentencePiece's token for a byte of text that has no piece


class Span(NamedTuple):
  """Tokens of two documents with the same text, as half-open ranges: of `mine` (student) and `theirs` (teacher)."""

  mine: tuple[int, int]
  theirs: tuple[int, int]

  @property
  def is_pair(self) -> bool:
    """True if the span is one token of each document."""
    return all(stop - start == 1 for start, stop in self)


@dataclasses.dataclass(frozen=True)
class Bytes:
  """The text of each token of a tokenizer.

  Attributes:
    texts: by token id, UTF-8 that may be a part of a character; None for special tokens and ids without a token.
    special: {special token: its id}.
    stop_ids: ids of tokens that end a turn.
  """

  texts: list[bytes | None]
  special: dict[str, int]
  stop_ids: frozenset[int]

  @classmethod
  def of(cls, tokenizer: Tokenizer) -> Bytes:
    """Reads the texts from the vocabulary of a byte-level or a SentencePiece tokenizer."""
    special = {token.content: i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special}
    vocabulary = tokenizer.hf.get_vocab()
    texts: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    # Byte-level tokenizers write space and line break as Ġ and Ċ; in SentencePiece these are letters, and ▁ is space.
    is_byte_level = {'Ġ', 'Ċ'} <= vocabulary.keys() and '▁' not in vocabulary
    to_bytes = _from_letters if is_byte_level else _from_piece
    for token, i in vocabulary.items():
      if token not in special:
        texts[i] = to_bytes(token)
    return cls(texts, special, frozenset(tokenizer.stop_ids))

  def pieces(self, ids: Sequence[int]) -> list[bytes]:
    """Returns the text of each token: b'' for a special token, and for an id of the model without a token."""
    return [i < len(self.texts) and self.texts[i] or b'' for i in ids]

  def readable(self, ids: list[int]) -> tuple[list[int], bool]:
    """Returns (the tokens before the first that is no text, whether only a stop token at the end follows them)."""
    pieces, stops = _pieces(ids, self)
    read = len([*itertools.takewhile(bool, pieces)])
    return ids[:read], stops and read == len(pieces)


def _from_letters(token: str) -> bytes:
  letters = tokenizer_lib.byte_of_letter()
  if all(letter in letters for letter in token):
    return bytes(letters[letter] for letter in token)
  return token.encode()  # a token that was added to the vocabulary as text


def _from_piece(token: str) -> bytes:
  if byte := _BYTE.fullmatch(token):
    return bytes([int(byte[1], 16)])
  return token.replace('▁', ' ').encode()


def reader(theirs: Tokenizer, mine: Tokenizer, template_kwargs: Mapping[str, Any]) -> Tokenizer:
  """Returns `theirs` so that it renders chats: with my chat template if it has none, and with these variables."""
  if not theirs.chat_template and mine.chat_template:
    theirs = tokenizer_lib.load(theirs.source, mine.chat_template)
  return theirs.with_template_kwargs(template_kwargs)


def same_tokens(mine: Bytes, theirs: Bytes, ends: Mapping[int, int]) -> np.ndarray:
  """Returns [size of their vocabulary] int32: for each of their tokens my id of the same token, or -1.

  Args:
    ends: {id of a token that ends their turns: id of the token that ends mine}.
  """
  my_ids = {text: i for i, text in reversed(list(enumerate(mine.texts))) if text is not None}
  same = np.array([-1 if text is None else my_ids.get(text, -1) for text in theirs.texts], np.int32)
  for token, i in theirs.special.items():
    same[i] = mine.special.get(token, -1)
  for their_end, my_end in ends.items():
    same[their_end] = my_end
  return same


def runs(example: Example) -> list[tuple[int, int]]:
  """Returns the half-open ranges of consecutive tokens with a weight, such as assistant turns."""
  weighted = np.asarray(example.loss_mask) > 0
  edges = np.flatnonzero(np.diff(np.concatenate([[False], weighted, [False]])))
  return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def spans(mine: Example, theirs: Example, texts: tuple[Bytes, Bytes]) -> Iterator[Span]:
  """Yields the spans of two renderings of one document, run by run.

  If the texts of a run differ, because one template adds something or one tokenizer reads a part as a special token, no
  span reaches beyond the first difference. A stop token that ends a run is a span of its own.

  Args:
    texts: of the tokens of `mine` and of `theirs`.
  """
  for pair in zip(runs(mine), runs(theirs)):
    my_pieces, i_stop = _pieces(mine.tokens[slice(*pair[0])].tolist(), texts[0])
    their_pieces, they_stop = _pieces(theirs.tokens[slice(*pair[1])].tolist(), texts[1])
    pieces = _with_marks(my_pieces), _with_marks(their_pieces)
    _drop_leading_space(pieces)
    # Each byte is one character of Latin-1.
    common = chat.common_length(*(b''.join(side).decode('latin-1') for side in pieces))
    # {bytes of text so far: number of tokens} of either side.
    ends = [dict(zip(itertools.accumulate(map(len, side)), range(1, len(side) + 1))) for side in pieces]
    begin = (0, 0)
    for cut in sorted(set(ends[0]) & set(ends[1])):
      if cut > common:
        break
      end = ends[0][cut], ends[1][cut]
      if cut:
        yield _span(pair, begin, end)
      begin = end
    if i_stop and they_stop and begin == (len(my_pieces), len(their_pieces)):
      yield _span(pair, begin, (begin[0] + 1, begin[1] + 1))


def _pieces(ids: list[int], tokens: Bytes) -> tuple[list[bytes], bool]:
  """Returns (the text of each token of a run without its stop token, whether it has one)."""
  stops = bool(ids) and ids[-1] in tokens.stop_ids
  return tokens.pieces(ids[:-1] if stops else ids), stops


def _with_marks(pieces: list[bytes]) -> list[bytes]:
  """Returns the texts of tokens; a special token after the first text has the byte 0xff, which is in no text."""
  first = next((n for n, piece in enumerate(pieces) if piece), len(pieces))
  return pieces[:first] + [piece or b'\xff' for piece in pieces[first:]]


def _span(pair: Sequence[tuple[int, int]], begin: tuple[int, int], end: tuple[int, int]) -> Span:
  return Span(*((first + a, first + b) for (first, _), a, b in zip(pair, begin, end)))


def _drop_leading_space(sides: Sequence[list[bytes]]) -> None:
  """Drops the space that SentencePiece puts before a text, if the other side has none."""
  has_space = [b''.join(pieces).startswith(b' ') for pieces in sides]
  for pieces, has, other_has in zip(sides, has_space, reversed(has_space)):
    if has and not other_has:
      first = next(n for n, piece in enumerate(pieces) if piece)
      pieces[first] = pieces[first][1:]
