"""google-jetstream: our engine under its interface, and its mock engine as our rollout.

The package needs TensorFlow, so these tests need an environment of their own:
pip install -e '.[jetstream,test]' there, and pytest --long.
"""

import importlib
import importlib.metadata
import sys

import numpy as np
import pytest
import tiny

from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Prompt

KEY, NEW = np.array([1, 2], np.uint32), 7
INSTALLED = any(d.name == 'google-jetstream' for d in importlib.metadata.distributions())
installed = pytest.mark.skipif(
  not INSTALLED,
  reason='google-jetstream is not installed; it needs '
  "TensorFlow: pip install -e '.[jetstream]' in an environment of its own",
)


@pytest.mark.skipif(INSTALLED, reason='google-jetstream is installed')
@pytest.mark.parametrize('other', [False, True])
def test_missing_jetstream_or_another_package_of_that_name_is_reported(other, tmp_path, monkeypatch):
  if other:
    (tmp_path / 'jetstream').mkdir()
    (tmp_path / 'jetstream/__init__.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path)
  message = 'is another project' if other else r'\.\[jetstream\]'
  with pytest.raises(InputError, match=message):
    importlib.import_module('jaxpost.rollout.jetstream')
  assert 'jaxpost.rollout.jetstream' not in sys.modules


@pytest.fixture(scope='module')
def jetstream():
  return importlib.import_module('jaxpost.rollout.jetstream')


@pytest.fixture(scope='module')
def params():
  return tiny.params(model_lib.build(tiny.config(initializer_range=0.15)))


def engine(params, block):
  native_engine = native.NativeEngine(
    model_lib.build(tiny.config(initializer_range=0.15)),
    native.SamplerConfig(slots=3, max_prompt=16, max_new_tokens=NEW, stop_ids=(5,), block=block, temperature=0.0),
    tiny.one_device('rollout'),
    tiny.EXACT,
    Ledger(),
  )
  native_engine.load(params, 0)
  return native_engine


def prompts():
  random = np.random.RandomState(0)
  return [Prompt(i, random.randint(0, 131, 3 + i, np.int32), '', {}) for i in range(5)]


@pytest.mark.long
@installed
def test_our_engine_passes_the_steps_of_the_jetstream_test(jetstream, params):
  """The steps of jetstream's own test of its mock: prefill, insert into a slot, generate repeatedly."""
  ours = jetstream.JetStreamEngine(engine(params, 1), KEY)
  assert isinstance(ours, jetstream.engine_api.Engine)
  weights, text = ours.load_params(params), prompts()[2].tokens
  prefix = ours.prefill(params=weights, padded_tokens=np.pad(text, (0, 11)), true_length=len(text))
  state = ours.insert(prefix, ours.init_decode_state(), slot=1)
  expected = engine(params, 4)(prompts()[2:3], group_size=1, run_key=KEY, step=0)
  for i in range(expected.lengths[0]):
    state, result = ours.generate(params=weights, decode_state=state)
    data = result.convert_to_numpy().get_result_at_slot(1)
    assert data.tokens.item() == expected.completions[0, i]
    assert data.valid.item() == 1 and data.lengths.item() == i + 1
    assert result.get_result_at_slot(0).valid.item() == 0
  assert ours.max_concurrent_decodes == 3 and ours.samples_per_slot == 1
  assert ours.max_prefill_length == 16 and ours.mesh.size == 1
  with pytest.raises(InputError, match='block of 4'):
    jetstream.JetStreamEngine(engine(params, 4), KEY)


@pytest.mark.long
@installed
def test_jetstream_rollout_equals_the_native_rollout(jetstream, params):
  ours = jetstream.JetStreamEngine(engine(params, 1), KEY)
  expected = engine(params, 4)(prompts(), group_size=2, run_key=KEY, step=0)

  def rescore(rollout):
    return np.where(np.arange(NEW) < rollout.lengths[:, None], -1.0, 0)

  rollout = jetstream.JetStreamRollout(
    ours, max_new_tokens=NEW, stop_ids=(5,), rescore=rescore, params=ours.load_params
  )
  rollout.load(params, 3)
  actual = rollout(prompts(), group_size=2, run_key=KEY, step=4)
  assert (actual.completions == expected.completions).all()
  assert (actual.lengths == expected.lengths).all()
  assert (actual.finished == expected.finished).all()
  assert (actual.step, actual.version) == (4, 3)
  assert actual.logprobs.sum() == -actual.lengths.sum()
  with pytest.raises(InputError, match='temperature'):
    rollout(prompts(), group_size=1, run_key=KEY, step=0, sampling={'temperature': 1.0})


@pytest.mark.long
@installed
def test_jetstream_mock_engine_works_as_a_rollout(jetstream):
  from jetstream.engine import mock_engine

  mock = mock_engine.TestEngine(batch_size=2, cache_length=64, weight=2.0)
  rollout = jetstream.JetStreamRollout(
    mock, max_new_tokens=3, stop_ids=(399,), rescore=lambda sampled: np.zeros(sampled.completions.shape)
  )
  rollout.load(None, 1)
  texts = [np.array([2, 65, 66], np.int32), np.array([2, 65], np.int32)]
  batch = [Prompt(i, x, '', {}) for i, x in enumerate(texts)]
  generated = rollout(batch, group_size=2, run_key=KEY, step=0)
  # As in jetstream's first test of the mock: 2 x (2 + 65 + 66) = 266, then 266 + 266 / 2 = 399, the stop id.
  assert generated.completions[:2].tolist() == [[266, 399, 0]] * 2
  assert generated.lengths.tolist() == [2, 2, 3, 3]
  assert generated.completions[2:].tolist() == [[134, 201, 301]] * 2
  assert generated.finished.tolist() == [True, True, False, False]
