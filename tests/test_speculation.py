"""Speculation: drafts change how fast completions are sampled, and not which ones."""

import numpy as np
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import drafts, native, sampler_config
from jaxpost.rollout.sequence import ActiveSequence, DrawnTokens, Request

KEY = np.array([1, 2], np.uint32)
FIELDS = dict(slots=8, max_prompt=12, max_new_tokens=24, stop_ids=(5,), block=6, temperature=0.2)


@pytest.fixture(scope='module')
def model():
  return model_lib.build(tiny.config(initializer_range=0.15))


@pytest.fixture
def cheap(monkeypatch):
  """Drafts pay as on an accelerator."""
  monkeypatch.setattr(drafts, 'verify_cost', lambda *_: 2.0)


def make_engine(model, params, compute=tiny.EXACT, **fields):
  settings = native.SamplerConfig(**FIELDS | fields)
  engine = native.NativeEngine(
    model,
    settings,
    tiny.one_device('rollout'),
    compute,
    Ledger(),
    decode=lambda ids: ''.join(chr(97 + i % 26) for i in map(int, ids)),
  )
  if params:
    engine.load(params, version=3)
  return engine


def requests(groups=3, size=6, **sampling):
  random = np.random.RandomState(1)
  prompts = [random.randint(0, 131, 5 + n, np.int32) for n in range(groups)]
  return [Request(prompt, 20 + n, i, sampling) for n, prompt in enumerate(prompts) for i in range(size)]


def serve(engine, wanted, **options):
  """({(prompt, sample): Completion}, figures)."""
  done = {}

  def listen(completions, idle):
    done.update({(c.request.prompt, c.request.sample): c for c in completions})
    return ()

  figures = engine.serve(wanted, run_key=KEY, step=2, next_requests=listen, **options)
  return done, figures


CASES = {
  'compaction': dict(max_new_tokens=40),
  'pages that do not suffice': dict(page_size=4, cache_tokens=80),
  'everything reported': dict(
    slots=5, top_logprobs=3, top_k=4, sampling_mask=True, min_new_tokens=3, stop_strings=('ab',)
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_the_same_samples(name, model, params, cheap):
  wanted = requests()
  plain, _ = serve(make_engine(model, params, **CASES[name]), wanted)
  found, figures = serve(make_engine(model, params, **CASES[name], speculation='ngram'), wanted)
  assert found.keys() == plain.keys() and len(found) == len(wanted)
  assert figures['draft/blocks'] >= 2 and figures['draft/acceptance_rate'] > 0.1, figures
  for key, one in plain.items():
    np.testing.assert_array_equal(found[key].tokens, one.tokens)
    assert (found[key].finished, found[key].stop_string) == (one.finished, one.stop_string)
    np.testing.assert_allclose(found[key].logprobs, one.logprobs, atol=1e-5)
    np.testing.assert_allclose(found[key].behavior_logprobs, one.behavior_logprobs, atol=1e-5)
    if one.allowed is not None:
      np.testing.assert_array_equal(found[key].allowed, one.allowed)
      np.testing.assert_array_equal(found[key].top_ids, one.top_ids)


def test_a_draft_is_what_followed_the_last_tokens():
  texts = drafts._Texts()
  texts.extend(0, np.array([1, 2, 3, 4, 5, 6]))
  assert texts.draft(0, 4) == []  # its own end has no continuation yet
  texts.extend(1, np.array([9, 2, 3, 4]))
  assert texts.draft(1, 1) == [5] and texts.draft(1, 4) == [5, 6]
  texts.extend(1, np.array([7]))
  texts.extend(2, np.array([2, 3, 4]))
  assert texts.draft(2, 4) == [7]  # the newest


def repeating(seed=0):
  tokens = np.array([1, 2, 3, 4, 1, 2, 3])
  return {0: ActiveSequence(Request(tokens, seed), 20, tokens)}


def test_drafts_that_are_wrong_are_given_up_and_tried_again(cheap):
  seen = drafts.Drafts(7, 'cpu')
  while seen.propose(repeating(), 8):
    seen.count(7, 0)
  assert 10 < seen.drafted / 7 < 60
  assert any(seen.propose(repeating(), 8) for _ in range(40))
  assert seen.figures() == {'draft/tokens': seen.drafted, 'draft/acceptance_rate': 0.0, 'draft/blocks': 0}


def test_texts_are_forgotten_by_prompt(cheap, monkeypatch):
  monkeypatch.setattr(drafts, '_MAX_TOKENS', 10)
  seen = drafts.Drafts(8, 'cpu')
  live = repeating(0) | {1: repeating(1)[0]}
  assert seen.propose(live, 2).lengths.tolist() == [4, 4]
  assert list(seen.prompts) == [1]  # the second text has taken the place of the first
  for sequence in live.values():
    sequence.blocks.append(DrawnTokens(np.array([4, 1, 2, 3]), *[()] * 6))
    seen.add(sequence)
  assert list(seen.prompts) == [1] and seen.tokens == 11
  assert seen.propose(live, 2).lengths.tolist() == [0, 4]


def test_what_verifying_costs():
  assert drafts.verify_cost('gpu', 8, 31) == 2  # both passes read the weights, and nothing takes longer
  assert drafts.verify_cost('gpu', 64, 31) == 1 + 64 * 31 / 256
  assert drafts.verify_cost('gpu', 1024, 31) == 1 + 31  # bound by arithmetic: nothing is saved
  assert drafts.Drafts(31, 'gpu').propose(repeating(), 8)
  assert drafts.Drafts(31, 'gpu').propose(repeating(), 1024) is None


def test_what_cannot_verify_drafts_is_refused(model, params):
  with pytest.raises(InputError, match='rollout.speculation: rollout.block=1 '):
    make_engine(model, params, speculation='ngram', block=1)
  with pytest.raises(InputError, match='rollout.speculation: drafts are not verified by each device'):
    sampler_config.check(model.config, native.SamplerConfig(**FIELDS, speculation='ngram'), 2)
  with pytest.raises(InputError, match='rollout.speculation: drafts are verified several tokens at a time'):
    make_engine(model_lib.build(tiny.hybrid()), {}, speculation='ngram')
