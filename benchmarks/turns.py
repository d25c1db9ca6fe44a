"""Times conversations of four turns, with their key-value cache reused and with every turn prefilled anew.

  python benchmarks/turns.py --bf16 --shape=xs --batch=8 --samples=16 --new=16

--batch slots, --samples conversations. A turn samples at most --new tokens, and a made-up
answer of 24 tokens follows some blocks later, as if a tool had run in between.
"""

import collections
import dataclasses
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the clone

import numpy as np

from benchmarks import command
from jaxpost import testing
from jaxpost.rollout.sequence import Completion, Request
from jaxpost.stage import on_policy
from jaxpost.tools import bench

_TURNS = 4
_ANSWER = 24  # tokens between two turns
_DELAY = 4  # calls of `next_requests` before an answer arrives


class Conversations:
  """Conversations whose answers are made up.

  requests: the first turn of each. sampled: tokens of all completions so far.
  """

  def __init__(self, prompts: testing.RandomPrompts, max_tokens: int):
    self.requests = [
      Request(prompt.tokens, prompt.index, 0, dict(max_tokens=max_tokens)) for prompt in next(prompts)[0]
    ]
    self.sampled = 0
    self._answer = np.arange(40, 40 + _ANSWER, dtype=np.int32)
    self._turns = collections.Counter()  # finished, of each prompt
    self._waiting = collections.deque()  # [calls until the answer arrives, Request], oldest first

  def next_requests(self, done: list[Completion], idle: bool) -> list[Request]:
    """Returns the next turns whose answers have arrived; all of them if the sampler would idle."""
    for completion in done:
      request = completion.request
      self.sampled += len(completion.tokens)
      self._turns[request.prompt] += 1
      if self._turns[request.prompt] < _TURNS:
        tokens = np.concatenate([request.tokens, completion.tokens, self._answer])
        self._waiting.append([_DELAY, Request(tokens, request.prompt, 0, request.sampling)])
    for item in self._waiting:
      item[0] -= 1
    ready = []
    while self._waiting and (idle or self._waiting[0][0] < 0):
      ready.append(self._waiting.popleft()[1])
    return ready


def measure(options: bench.Options, workdir: str) -> dict:
  """Returns seconds and the sampler's figures with the cache reused ('kept/...') and without ('read/...')."""
  del workdir
  turn = options.new
  # A whole conversation is one sequence.
  options = dataclasses.replace(
    options, samples=options.samples or options.batch, new=_TURNS * turn + (_TURNS - 1) * _ANSWER
  )
  placed, params = bench.place_with_weights('sample', options)
  engine = on_policy.make_engine(placed, slots=options.batch)
  engine.load(params, 0)
  vocab = placed.model.config.vocab_size
  out = {}
  for name, reuse_cache in (('kept', True), ('read', False)):
    wall = []
    cpu = []
    for _ in range(options.steps + 1):
      conversations = Conversations(testing.RandomPrompts(options.samples, options.prompt, vocab), turn)
      start = time.perf_counter()
      busy = time.process_time()
      figures = engine.serve(
        conversations.requests,
        run_key=on_policy.run_key(0, 1),
        step=0,
        next_requests=conversations.next_requests,
        prefill_rows=2,
        reuse_cache=reuse_cache,
      )
      wall.append(time.perf_counter() - start)
      cpu.append(time.process_time() - busy)
    found = dict(
      wall_s=float(np.median(wall[1:])), cpu_s=float(np.median(cpu[1:])), tokens=conversations.sampled, **figures
    )
    out |= {f'{name}/{key}': value for key, value in found.items()}
  return out


if __name__ == '__main__':
  command.run('turns', measure)
