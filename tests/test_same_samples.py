"""The same samples whatever the circumstances, on eight fake devices."""

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
  """{case: 'ok' or what is wrong}, from one process for all of them."""
  run = children.run(__file__, devices=8, timeout=900)
  return dict(line.split(': ', 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize('case', CASES)
def test_same_samples(report, case):
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
  wanted = [
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
    told, requests = {}, wanted
    if order is not None:
      requests = [wanted[i] for i in np.random.RandomState(order).permutation(len(wanted))]

    def follow(completions, idle):
      """Keeps the completions, and continues each of them once with three more tokens."""
      del idle
      more = []
      for c in completions:
        r, turn = c.request, c.request.tag or 0
        told[r.prompt, r.sample, turn] = c
        if not turn:
          more.append(
            Request(
              np.concatenate([r.tokens, c.tokens, [9, 8, 7]]).astype(np.int32),
              r.prompt,
              r.sample,
              dict(max_tokens=9),
              1,
            )
          )
      return more

    engine.serve(requests, run_key=np.array(KEY, np.uint32), step=3, next_requests=follow)
    return told

  plains = {dtype: sample('data=1', 1, dict(dtype=dtype), None) for dtype in ('float32', 'bfloat16')}
  for plain in plains.values():
    exact = sum(len(c.tokens) for c in plain.values())
    assert exact > 300 and len(plain) == 2 * len(wanted)
    assert len({tuple(c.tokens) for k, c in plain.items() if not k[2]}) == len(wanted)
  for name, case in CASES.items():
    off, apart = 0.0, 0
    plain = plains[case[2].get('dtype', 'float32')]
    for key, c in sample(*case).items():
      ours = plain[key]
      if ours.tokens.tolist() == c.tokens.tolist():
        off = max(off, float(np.abs(ours.logprobs - c.logprobs).max()))
        assert ours.finished == c.finished
        assert c.top_ids.shape[1] == c.request.sampling.get('top_logprobs', 2)
        off = max([off, *np.abs(ours.top_logprobs - c.top_logprobs).flat])
        if 'dtype' not in case[2]:
          assert ours.top_ids.tolist() == c.top_ids.tolist()
      else:
        apart += 1
    loose = 'dtype' in case[2]
    fine = off <= (0.05 if loose else 1e-5) and apart <= exact * 3 / 1000
    print(f'{name}: ' + ('ok' if fine else f'{apart} differ, {off} off'))


if __name__ == '__main__':
  main()
