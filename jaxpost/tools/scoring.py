"""Log-probs of texts (teacher forcing), by the program that scores rollouts in training.

Legend: T tokens of a text, k most probable tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpost.data import packing
from jaxpost.data.examples import Example
from jaxpost.distributed.mesh import Layout
from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.programs import score
from jaxpost.programs.compile import Program
from jaxpost.roles import place
from jaxpost.rollout.buckets import bucket
from jaxpost.stage import model_limits, schema
from jaxpost.stage import place as place_lib
from jaxpost.stage.records import PreparedStage
from jaxpost.tools.inference import Weights
from jaxpost.tools.working import working

_ROWS = 8  # per device at a time
_SMALLEST = 64  # tokens of a row


class TextScore(NamedTuple):
  """The log-probs of a text, at temperature 1; 0 at the first token and at tokens without weight."""

  logprobs: np.ndarray  # [T] float32
  top_ids: np.ndarray  # [T, k] int32, alternatives of each token, most probable first
  top_logprobs: np.ndarray  # [T, k] float32


class Scorer:
  """Scores texts with the weights of a model; compiles a program for each power of two of tokens.

  Args:
    weights: of a language model.
    top: most probable tokens that are reported at each position.
    room: largest number of tokens of a text; 0: that of the model.
  """

  def __init__(self, weights: Weights, top: int = 0, room: int = 0) -> None:
    self.top = top
    limit = model_limits.longest(weights.inputs.model.config)
    self.room = min(room or limit, limit)
    self._weights = weights
    self._programs: dict[tuple[int, int], tuple[Layout, Program]] = {}

  def __call__(self, examples: Sequence[Example], where: str = 'prompt') -> Iterator[TextScore]:
    """Yields the score of each example; see `chunks`."""
    for scores in self.chunks(examples, where):
      yield from scores

  def chunks(self, examples: Sequence[Example], where: str = 'prompt') -> Iterator[list[TextScore]]:
    """Compiles the program, and returns an iterator over lists of scores, one list per batch.

    Raises:
      InputError: an example is too long; the message begins with `where`.
    """
    longest = max(len(example.tokens) for example in examples)
    if longest > self.room:
      raise InputError(f'{where}: {longest} tokens are more than the {self.room} that can be scored')
    shards = self._weights.layout.batch_shards
    rows = shards if len(examples) <= shards else _ROWS * shards
    length = bucket(longest, self.room, _SMALLEST)
    layout, program = self._program(rows, length)

    def placed(batch):
      return place(layout, rows, packing.to_batch([[example] for example in batch], length, rows, totals=()))

    program.compile(self._weights.params, placed(examples[:rows]))

    def scores(batch):
      result = to_host(program(self._weights.params, placed(batch)))
      if self.top:
        top_ids, top_logprobs, logprobs = result
      else:
        logprobs = result.logprobs
        top_ids = np.zeros((*logprobs.shape, 0), np.int32)
        top_logprobs = np.zeros((*logprobs.shape, 0), np.float32)
      # Arrays are [1, rows, length, ...]: one micro-batch, one text per row.
      arrays = logprobs, top_ids, top_logprobs
      return [TextScore(*(x[0, i, : len(e.tokens)] for x in arrays)) for i, e in enumerate(batch)]

    return (scores(examples[start : start + rows]) for start in range(0, len(examples), rows))

  def _program(self, rows: int, length: int) -> tuple[Layout, Program]:
    """Returns the layout and the program for rows of a length."""
    if (rows, length) not in self._programs:
      inputs = self._weights.inputs
      train = dataclasses.replace(inputs.config.train, batch_size=rows, micro_batch_size=rows, row_length=length)
      config = dataclasses.replace(inputs.config, train=train, mesh=schema.MeshSection())
      placed = place_lib.place_stage(PreparedStage(dataclasses.replace(inputs, config=config)))
      placed.ledger.announce = working.compiling
      args = placed.model, placed.train, placed.compute, placed.ledger
      if self.top:
        size = placed.model.config.vocab_size
        program = score.make_topk(*args, k=self.top, vocab_size=size, temperature=1.0, own=True)
      else:
        program = score.make_score(*args)
      self._programs[rows, length] = placed.train, program
    return self._programs[rows, length]
