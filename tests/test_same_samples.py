"""The engine draws the same samples for any mesh, slots, blocks, pages and order, on eight simulated devices."""

import children
import pytest

NEW, KEY = 24, (7, 11)
# name -> (mesh, devices, fields of the sampler, order of the requests)
CASES = {
  'few slots': ('data=1', 1, dict(slots=3), None),
  'one token a block': ('data=1', 1, dict(slots=5, block=1), None),
  'long blocks': ('data=1', 1, dict(slots=16, block=32), None),
  'other order': ('data=1', 1, dict(slots=4), 3),
  'pages': ('data=1', 1, dict(slots=6, page_size=8), None),
  'few pages, other order': ('data=1', 1, dict(slots=12, page_size=16, cache_tokens=208), 5),
  'data=8': ('data=8', 8, dict(slots=8), 1),
  'slots of each of two': ('data=2', 2, dict(slots=6), 4),
  'tensor=8': ('tensor=8', 8, dict(slots=8), None),
  'slots that tensor=4 does not divide': ('tensor=4', 4, dict(slots=6), None),
  'data=2,tensor=4': ('data=2,tensor=4', 8, dict(slots=4), None),
  'pages, tensor=2': ('tensor=2', 2, dict(slots=8, page_size=8), 2),
  'as accelerators do': ('data=2', 2, dict(slots=6, platform='gpu'), None),
  'accelerator pages': ('data=1', 1, dict(slots=6, page_size=8, platform='gpu'), None),
  'bfloat16': ('data=1', 1, dict(slots=5, dtype='bfloat16'), None),
}


@pytest.fixture(scope='module')
def report():
  """{case: 'ok' or the error}, from one child process for all cases."""
  run = children.run(__file__, devices=8, timeout=900)
  return dict(line.split(': ', 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize('case', CASES)
def test_samples_match_those_of_one_device_with_a_slot_per_request(report, case):
  assert report[case] == 'ok'


def main():
  import dataclasses

  import jax
  import numpy as np
  import tiny

  from jaxpost.distributed.phases import make_layout
  from jaxpost.models import model as model_lib
  from jaxpost.programs.compile import Ledger
  from jaxpost.rollout import native
  from jaxpost.rollout.sequence import Request

  model = model_lib.build(tiny.config(num_heads=8, num_kv_heads=4, initializer_range=0.15))
  params = tiny.params(model)
  random = np.random.RandomState(1)
  settings = dict(top_logprobs=0), dict(top_k=40), dict(temperature=0.0)
  all_requests = [
    Request(random.randint(0, 131, n, np.int32), 30 + n, i, settings[i]) for n in (2, 5, 9, 17) for i in range(3)
  ]

  def sample(mesh, devices, fields, order):
    fields = dict(fields)
    compute = dataclasses.replace(tiny.EXACT, platform=fields.pop('platform', 'cpu'))
    if 'dtype' in fields:
      dtype = fields.pop('dtype')
      compute = dataclasses.replace(compute, dtype=dtype, cache=dtype)
    layout = make_layout(mesh, 'rollout', devices=jax.devices()[:devices])
    engine = native.NativeEngine(
      model,
      native.SamplerConfig(
        **{
          **dict(
            slots=12, max_prompt=20, max_new_tokens=NEW, stop_ids=(5, 6, 7), block=4, max_context=80, top_logprobs=2
          ),
          **fields,
        }
      ),
      layout,
      compute,
      Ledger(),
    )
    engine.load(layout.put(jax.tree.map(np.asarray, params)), version=1)
    completions_by_key, requests = {}, all_requests
    if order is not None:
      requests = [all_requests[i] for i in np.random.RandomState(order).permutation(len(all_requests))]

    def follow(completions, idle):
      """Keeps the completions, and continues each of them once with three more tokens."""
      del idle
      continuations = []
      for c in completions:
        r, turn = c.request, c.request.tag or 0
        completions_by_key[r.prompt, r.sample, turn] = c
        if not turn:
          continuations.append(
            Request(
              np.concatenate([r.tokens, c.tokens, [9, 8, 7]]).astype(np.int32),
              r.prompt,
              r.sample,
              dict(max_tokens=9),
              1,
            )
          )
      return continuations

    engine.serve(requests, run_key=np.array(KEY, np.uint32), step=3, next_requests=follow)
    return completions_by_key

  references = {dtype: sample('data=1', 1, dict(dtype=dtype), None) for dtype in ('float32', 'bfloat16')}
  for reference in references.values():
    num_tokens = sum(len(c.tokens) for c in reference.values())
    assert num_tokens > 300 and len(reference) == 2 * len(all_requests)
    assert len({tuple(c.tokens) for k, c in reference.items() if not k[2]}) == len(all_requests)
  for name, case in CASES.items():
    largest_difference, num_different = 0.0, 0
    reference = references[case[2].get('dtype', 'float32')]
    for key, c in sample(*case).items():
      expected = reference[key]
      if expected.tokens.tolist() == c.tokens.tolist():
        largest_difference = max(largest_difference, float(np.abs(expected.logprobs - c.logprobs).max()))
        assert expected.finished == c.finished
        assert c.top_ids.shape[1] == c.request.sampling.get('top_logprobs', 2)
        largest_difference = max([largest_difference, *np.abs(expected.top_logprobs - c.top_logprobs).flat])
        if 'dtype' not in case[2]:
          assert expected.top_ids.tolist() == c.top_ids.tolist()
      else:
        num_different += 1
    is_bfloat16 = 'dtype' in case[2]
    passes = largest_difference <= (0.05 if is_bfloat16 else 1e-5) and num_different <= num_tokens * 3 / 1000
    print(f'{name}: ' + ('ok' if passes else f'{num_different} differ, {largest_difference} off'))


if __name__ == '__main__':
  main()
