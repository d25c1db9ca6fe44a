"""Pairs and labels on eight fake devices: what one device computes."""

import children
import pytest
import test_layouts

FEW = 'fsdp=8', 'data=2,fsdp=2,tensor=2'
METHODS = {'dpo': test_layouts.LAYOUTS, 'orpo': FEW, 'simpo': FEW, 'kto': FEW}


@pytest.fixture(scope='module')
def report():
  """{'method layout': 'ok' or what is wrong}, from one process."""
  run = children.run(__file__, devices=8, timeout=300)
  return dict(line.split(': ', 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize('method, layout', [(method, layout) for method in METHODS for layout in METHODS[method]])
def test_layout(report, method, layout):
  assert report[f'{method} {layout}'] == 'ok'


def main():
  import jax
  import test_preference as cases
  import tiny

  from jaxpost.distributed.phases import make_layout
  from jaxpost.distributed.transfer import to_host
  from jaxpost.models import model as model_lib

  model = model_lib.build(tiny.config(vocab_size=259, num_layers=1))
  models = model, tiny.params(model), tiny.params(model, seed=1)
  for method in METHODS:
    batch = cases.packed(method, rows=8)
    one = to_host(cases.computed(models, method, batch))
    for text in METHODS[method]:
      found = to_host(cases.computed(models, method, batch, layout=make_layout(text, 'train')))
      off = {'loss': abs(found[0] / one[0] - 1)}
      off |= {k: abs(found[1][k] - one[1][k]) / max(abs(one[1][k]), 0.1) for k in one[1]}
      for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found[2]), jax.tree.leaves(one[2])):
        off[jax.tree_util.keystr(path)] = tiny.largest(a - b) / tiny.largest(b)
      wrong = {name: float(x) for name, x in off.items() if not x <= 1e-5}
      print(f'{method} {text}: {wrong or "ok"}', flush=True)


if __name__ == '__main__':
  main()
