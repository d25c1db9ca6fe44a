"""Losses and gradients of DPO, ORPO, SimPO and KTO on meshes of eight fake devices equal those of one device."""

import children
import pytest
import test_layouts

FEW = 'fsdp=8', 'data=2,fsdp=2,tensor=2'
METHODS = {'dpo': test_layouts.LAYOUTS, 'orpo': FEW, 'simpo': FEW, 'kto': FEW}


@pytest.fixture(scope='module')
def report():
  """{'method layout': 'ok' or the quantities that differ}; one child process computes all of them."""
  run = children.run(__file__, devices=8, timeout=300)
  return dict(line.split(': ', 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize('method, layout', [(method, layout) for method in METHODS for layout in METHODS[method]])
def test_loss_and_gradients_on_mesh_equal_one_device(report, method, layout):
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
    loss, metrics, grads = to_host(cases.computed(models, method, batch))
    for text in METHODS[method]:
      outputs = to_host(cases.computed(models, method, batch, layout=make_layout(text, 'train')))
      mesh_loss, mesh_metrics, mesh_grads = outputs
      errors = {'loss': abs(mesh_loss / loss - 1)}
      errors |= {k: abs(mesh_metrics[k] - metrics[k]) / max(abs(metrics[k]), 0.1) for k in metrics}
      for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(mesh_grads), jax.tree.leaves(grads)):
        errors[jax.tree_util.keystr(path)] = tiny.difference(a, b)
      wrong = {name: float(x) for name, x in errors.items() if not x <= 1e-5}
      print(f'{method} {text}: {wrong or "ok"}', flush=True)


if __name__ == '__main__':
  main()
