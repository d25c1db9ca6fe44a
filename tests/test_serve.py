"""Serving: turns, per-request settings, stops, and what is refused."""

import collections

import numpy as np
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Request

NEW, KEY = 12, np.array([1, 2], np.uint32)


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config(initializer_range=0.15))


@pytest.fixture(scope='module')
def params(model):
  return tiny.params(model)


def decode(ids):
  """A text of one or two characters a token."""
  return ''.join(chr(97 + i % 26) * (1 + i % 2) for i in map(int, ids))


def make_engine(model, params, ledger=None, **fields):
  settings = native.SamplerConfig(**{**dict(
      slots=4, max_prompt=20, max_new_tokens=NEW, stop_ids=(), block=4,
      max_context=60), **fields})
  engine = native.NativeEngine(
      model, settings, tiny.one_device('rollout'), tiny.EXACT,
      ledger or Ledger(), decode)
  engine.load(params, version=3)
  return engine


@pytest.fixture(scope='module')
def engine(model, params):
  return make_engine(model, params)


def requests(count=7, **sampling):
  random = np.random.RandomState(1)
  return [Request(random.randint(0, 131, 3 + i, np.int32), 20 + i, i % 2,
                  sampling) for i in range(count)]


def serve(engine, wanted, follow=None, step=2):
  """{(prompt, sample): Completions, turn by turn}."""
  told = collections.defaultdict(list)

  def listen(completions, idle):
    for c in completions:
      told[c.request.prompt, c.request.sample].append(c)
    return follow(completions, idle) if follow else ()

  serve.figures = engine.serve(
      wanted, run_key=KEY, step=step, follow=listen)
  return told


def later(turns, tokens_a_turn=4):
  """A `follow` that goes on with each text, some blocks after its turn."""
  waiting = collections.deque()

  def follow(completions, idle):
    for c in completions:
      text = np.concatenate([c.request.tokens, c.tokens])
      if len(c.request.tokens) < turns[c.request.prompt]:
        waiting.append([int(c.request.prompt) % 3, Request(
            text, c.request.prompt, c.request.sample, c.request.sampling)])
    for item in waiting:
      item[0] -= 1
    ready = [r for n, r in waiting if n < 0 or idle]
    kept = [x for x in waiting if not (x[0] < 0 or idle)]
    waiting.clear()
    waiting.extend(kept)
    return ready

  return follow


def test_turns_draw_what_one_long_sample_draws(engine):
  whole = serve(engine, requests())
  wanted = requests(max_tokens=4)
  ends = {r.prompt: len(r.tokens) + NEW - 4 for r in wanted}
  turns = serve(engine, wanted, later(ends))
  assert len(turns) == 7
  for key, (one,) in whole.items():
    parts = turns[key]
    assert [len(p.tokens) for p in parts] == [4, 4, 4]
    np.testing.assert_array_equal(
        np.concatenate([p.tokens for p in parts]), one.tokens)
    np.testing.assert_allclose(
        np.concatenate([p.logprobs for p in parts]), one.logprobs, atol=1e-5)
  assert 0 < serve.figures['occupancy'] <= 1


def test_waiting_ends_when_nothing_comes(engine):
  calls = []

  def follow(completions, idle):
    del completions
    calls.append(idle)
    return ()

  assert len(serve(engine, requests(2), follow)) == 2
  assert calls.count(True) == 1 and calls[-1]
  assert not serve(engine, [])


@pytest.mark.parametrize('wrong,told', [
    (Request(np.zeros(0, np.int32), 4), 'prompt 4: is empty'),
    (Request(np.zeros(50, np.int32), 4), '50 tokens and 12 to draw'),
    (Request(np.zeros(3, np.int32), 4, 0, dict(stop_ids=(131,))),
     'stop_ids: 131 is outside the vocabulary of 131'),
    (Request(np.zeros(3, np.int32), 4, 0, dict(forbidden_ids=range(9))),
     '9 forbidden_ids, of 8'),
])
def test_what_cannot_be_served(engine, wrong, told):
  with pytest.raises(InputError, match=told):
    serve(engine, [wrong])
