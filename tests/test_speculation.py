"""Speculative decoding (`rollout.speculation`): drafts change the speed of sampling, but not the samples."""

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
def cheap_verification(monkeypatch):
  """Makes drafts pay on CPU, too, as on an accelerator."""
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


def serve(engine, requests_, **options):
  """Returns ({(prompt, sample): Completion}, figures)."""
  done = {}

  def listen(completions, idle):
    done.update({(c.request.prompt, c.request.sample): c for c in completions})
    return ()

  figures = engine.serve(requests_, run_key=KEY, step=2, next_requests=listen, **options)
  return done, figures


CASES = {
  'compaction': dict(max_new_tokens=40),
  'pages that do not suffice': dict(page_size=4, cache_tokens=80),
  'everything reported': dict(
    slots=5, top_logprobs=3, top_k=4, sampling_mask=True, min_new_tokens=3, stop_strings=('ab',)
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_speculation_draws_the_same_samples(name, model, params, cheap_verification):
  all_requests = requests()
  plain, _ = serve(make_engine(model, params, **CASES[name]), all_requests)
  speculative, figures = serve(make_engine(model, params, **CASES[name], speculation='ngram'), all_requests)
  assert speculative.keys() == plain.keys() and len(speculative) == len(all_requests)
  assert figures['draft/blocks'] >= 2 and figures['draft/acceptance_rate'] > 0.1, figures
  for key, expected in plain.items():
    np.testing.assert_array_equal(speculative[key].tokens, expected.tokens)
    assert (speculative[key].finished, speculative[key].stop_string) == (expected.finished, expected.stop_string)
    np.testing.assert_allclose(speculative[key].logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(speculative[key].behavior_logprobs, expected.behavior_logprobs, atol=1e-5)
    if expected.allowed is not None:
      np.testing.assert_array_equal(speculative[key].allowed, expected.allowed)
      np.testing.assert_array_equal(speculative[key].top_ids, expected.top_ids)


def test_ngram_draft_continues_the_newest_match_of_the_last_tokens():
  texts = drafts._Texts()
  texts.extend(0, np.array([1, 2, 3, 4, 5, 6]))
  assert texts.draft(0, 4) == []  # the only match is the end of the text itself, which nothing follows yet
  texts.extend(1, np.array([9, 2, 3, 4]))
  assert texts.draft(1, 1) == [5] and texts.draft(1, 4) == [5, 6]
  texts.extend(1, np.array([7]))
  texts.extend(2, np.array([2, 3, 4]))
  assert texts.draft(2, 4) == [7]  # of two matches, the newer counts


def repeating(seed=0):
  tokens = np.array([1, 2, 3, 4, 1, 2, 3])
  return {0: ActiveSequence(Request(tokens, seed), 20, tokens)}


def test_rejected_drafts_pause_speculation_and_are_retried(cheap_verification):
  drafter = drafts.Drafts(7, 'cpu')
  while drafter.propose(repeating(), 8):
    drafter.count(7, 0)
  assert 10 < drafter.drafted / 7 < 60
  assert any(drafter.propose(repeating(), 8) for _ in range(40))
  assert drafter.figures() == {'draft/tokens': drafter.drafted, 'draft/acceptance_rate': 0.0, 'draft/blocks': 0}


def test_oldest_prompts_are_dropped_from_the_draft_index(cheap_verification, monkeypatch):
  monkeypatch.setattr(drafts, '_MAX_TOKENS', 10)
  drafter = drafts.Drafts(8, 'cpu')
  live = repeating(0) | {1: repeating(1)[0]}
  assert drafter.propose(live, 2).lengths.tolist() == [4, 4]
  assert list(drafter.prompts) == [1]  # the second text has taken the place of the first
  for sequence in live.values():
    sequence.blocks.append(DrawnTokens(np.array([4, 1, 2, 3]), *[()] * 6))
    drafter.add(sequence)
  assert list(drafter.prompts) == [1] and drafter.tokens == 11
  assert drafter.propose(live, 2).lengths.tolist() == [0, 4]


def test_cost_of_verification_by_batch_size():
  assert drafts.verify_cost('gpu', 8, 31) == 2  # bound by the weights, which each of the two passes reads
  assert drafts.verify_cost('gpu', 64, 31) == 1 + 64 * 31 / 256
  assert drafts.verify_cost('gpu', 1024, 31) == 1 + 31  # bound by arithmetic: drafts save nothing
  assert drafts.Drafts(31, 'gpu').propose(repeating(), 8)
  assert drafts.Drafts(31, 'gpu').propose(repeating(), 1024) is None


def test_unsupported_speculation_is_refused(model, params):
  with pytest.raises(InputError, match='rollout.speculation: rollout.block=1 '):
    make_engine(model, params, speculation='ngram', block=1)
  with pytest.raises(InputError, match='rollout.speculation: drafts are not verified by each device'):
    sampler_config.check(model.config, native.SamplerConfig(**FIELDS, speculation='ngram'), 2)
  with pytest.raises(InputError, match='rollout.speculation: drafts are verified several tokens at a time'):
    make_engine(model_lib.build(tiny.hybrid()), {}, speculation='ngram')
