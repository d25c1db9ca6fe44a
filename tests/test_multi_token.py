"""Multi-token prediction: the module that predicts the token after the next one, its loss, gradients, runs and folders.

`transformers` has no such module. The reference is the published description (DeepSeek-V3, section 2.2) in torch and
float64, with a layer of `transformers` as its block, applied to each document alone.
"""

import copy
import dataclasses
import json
import math
import pathlib

import children
import flax.linen as nn
import jax
import numpy as np
import proofs
import pytest
import safetensors.numpy
import tiny

import jaxpost
from jaxpost.algorithms import sft
from jaxpost.distributed.phases import make_layout
from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export, multimodal, predictors, tensor_layout
from jaxpost.models import custom, decoder_configs
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.programs import train as programs
from jaxpost.stage import config as config_lib
from jaxpost.types import Batch

KEY = 'config.nll.mtp_weight'
WEIGHT = 0.3
LAYERS = 3  # main layers of the models in runs; the module is the layer behind them
HEADS = dict.fromkeys(('deepseek_v3', 'deepseek_v32'), dict(num_kv_heads=2))
COPIES = {
  f'model.layers.{LAYERS}.embed_tokens.weight': 'model.embed_tokens.weight',
  f'model.layers.{LAYERS}.shared_head.head.weight': 'lm_head.weight',
}
LENGTHS = (7, 1, 2, 9)  # of the documents in a row; padding follows
QWEN = {
  'enorm': 'mtp.pre_fc_norm_embedding',
  'hnorm': 'mtp.pre_fc_norm_hidden',
  'eh_proj': 'mtp.fc',
  'shared_head.norm': 'mtp.norm',
}
# Case of test_families.py -> fields in which its model differs; the last of `layer_types` is the layer of the module.
CASES = {
  'deepseek_v3': {},
  'glm4_moe': {},
  'qwen3_5': dict(num_hidden_layers=3, layer_types=['linear_attention', 'full_attention']),
  'qwen3_5_moe': dict(num_hidden_layers=3, layer_types=['linear_attention', 'full_attention']),
  'qwen3_next': dict(num_hidden_layers=3, layer_types=['linear_attention', 'full_attention']),
}


def objective(weight=WEIGHT):
  config = config_lib.parse(tiny.merged(tiny.run_config(''), dict(nll=dict(mtp_weight=weight))))
  return sft.objective(next(iter(config.values())))


def batch_of(rows=1, seed=0):
  """Returns rows of packed documents, in which about 30 % of the tokens are not trained."""
  size = sum(LENGTHS) + 3
  ids, mask = tiny.tokens((rows, size), seed=seed), np.random.RandomState(seed + 1).random((rows, size)) < 0.7
  ends = np.cumsum(LENGTHS)
  segments = np.digitize(np.arange(size), ends) + 1
  positions = np.concatenate([*map(np.arange, LENGTHS), np.zeros(3, int)])
  in_document = np.arange(size) < ends[-1]
  mask = (mask & in_document & (positions > 0)).astype(np.float32)
  shape = (rows, size)
  return Batch(
    tokens=np.where(in_document, ids, 0).astype(np.int32),
    positions=np.broadcast_to(positions, shape).astype(np.int32),
    segment_ids=np.broadcast_to(np.where(in_document, segments, 0), shape).astype(np.int32),
    loss_weights=mask / mask.sum(),
  )


class Reference:
  """A model of `transformers` whose last layer is the block of the module, with the module's other parts beside it."""

  def __init__(self, case, folder):
    import test_families
    import torch

    kind, fields = test_families.CASES[case]
    changes = copy.deepcopy(CASES[case])
    self.layers = fields.get('num_hidden_layers', 2) if not changes else changes['num_hidden_layers'] - 1
    if changes:
      changes['layer_types'] = (changes['layer_types'] * 2)[: self.layers] + ['full_attention']
    fields = fields | changes | dict(num_hidden_layers=self.layers + 1)
    with pytest.MonkeyPatch.context() as patch:
      patch.setitem(test_families.CASES, case, (kind, fields))
      self.network = test_families.make(case, folder).double()
    self.network.config._experts_implementation = 'eager'  # its grouped products do not support float64
    for path, value in self.network.named_buffers():
      if path.endswith('correction_bias'):  # rounds the value to float32, as in jaxpost
        value.copy_(value.float())
    width = self.network.config.hidden_size
    norm = type(self.network.model.norm)
    self.parts = torch.nn.ModuleDict({name: norm(width, 0.05) for name in ('enorm', 'hnorm', 'shared_head_norm')})
    self.parts['eh_proj'] = torch.nn.Linear(2 * width, width, bias=False)
    torch.manual_seed(1)
    for p in self.parts.parameters():
      p.data = 0.4 * torch.randn_like(p) + (p.dim() == 1)
    self.parts.double()
    self.names = QWEN if changes else {}

  def through(self, x, layers, norm):
    model = self.network.model
    saved = model.layers, model.norm, model.config.num_hidden_layers
    types = getattr(model.config, 'layer_types', None)
    import torch

    model.layers, model.norm = torch.nn.ModuleList([model.layers[i] for i in layers]), norm
    model.config.num_hidden_layers = len(layers)
    if types:
      model.config.layer_types = [types[i] for i in layers]
    out = model(inputs_embeds=x, use_cache=False).last_hidden_state
    model.layers, model.norm, model.config.num_hidden_layers = saved
    if types:
      model.config.layer_types = types
    return out

  def loss(self, batch):
    """Returns the weighted cross entropies of the next token, and of the token after it, summed over documents."""
    import torch

    main, module = 0.0, 0.0
    embed, head = self.network.model.embed_tokens, self.network.lm_head
    starts = np.cumsum([0, *LENGTHS[:-1]])
    for row in range(len(batch.tokens)):
      for start, length in zip(starts, LENGTHS):
        ids = torch.tensor(batch.tokens[row, start : start + length]).long()
        weights = torch.tensor(batch.loss_weights[row, start : start + length]).double()
        x = self.through(embed(ids)[None], range(self.layers), self.network.model.norm)
        logp = torch.log_softmax(head(x[0]), -1)
        main = main - sum(weights[t] * logp[t - 1, ids[t]] for t in range(1, length))
        if length < 3:
          continue
        both = self.parts['enorm'](embed(ids[1:])), self.parts['hnorm'](x[0, :-1])
        y = self.parts['eh_proj'](torch.cat(both, -1))[None]
        y = self.through(y, [self.layers], self.parts['shared_head_norm'])
        logp = torch.log_softmax(head(y[0]), -1)
        module = module - sum(weights[t] * logp[t - 2, ids[t]] for t in range(2, length))
    return main, module

  def named(self, tensors, parts):
    """Renames tensors of the network, and of the other parts, as in a published folder."""
    block, out = f'model.layers.{self.layers}.', {}
    for name, x in tensors.items():
      if self.names and name.startswith(block):
        name = f'mtp.layers.0.{name.removeprefix(block)}'
      out[name] = x
    for name, x in parts.items():
      name = name.replace('shared_head_norm', 'shared_head.norm')
      part, kind = name.rsplit('.', 1)
      out[f'{self.names.get(part, block + part)}.{kind}'] = x
    return out


def write(reference, folder, target):
  """Writes a folder as models are published, with the module's tensors and their count; returns the tensors."""
  parts = {name: p.detach().numpy() for name, p in reference.parts.named_parameters()}
  tensors = reference.named(safetensors.numpy.load_file(folder / 'model.safetensors'), parts)
  if not reference.names:
    block = f'model.layers.{reference.layers}'
    tensors[f'{block}.embed_tokens.weight'] = tensors['model.embed_tokens.weight']
    tensors[f'{block}.shared_head.head.weight'] = tensors['lm_head.weight']
  target.mkdir()
  tensors = {k: np.asarray(x, np.float32) for k, x in tensors.items()}
  safetensors.numpy.save_file(tensors, target / 'model.safetensors', metadata={'format': 'pt'})
  raw = json.loads((folder / 'config.json').read_text())
  raw |= dict(num_hidden_layers=reference.layers, num_nextn_predict_layers=1)
  for name in ('layer_types', 'mlp_layer_types'):
    if name in raw:
      raw[name] = raw[name][: reference.layers]
  (target / 'config.json').write_text(json.dumps(raw))
  return tensors


@pytest.mark.parametrize('case', [pytest.param('deepseek_v3', marks=pytest.mark.ci), *list(CASES)[1:]])
def test_mtp_loss_gradients_and_export_match_the_float64_reference(case, tmp_path):
  """Packed documents give what each document gives alone; an export has the same names and bits."""
  pytest.importorskip('torch')
  import test_families

  reference = Reference(case, tmp_path / 'more')
  tensors = write(reference, tmp_path / 'more', tmp_path / 'model')
  cfg = predictors.with_module(hf.read_config(tmp_path / 'model'), tmp_path / 'model', KEY)
  model = model_lib.build(cfg)
  params = hf.load_params(tmp_path / 'model', model, model.shardings(tiny.one_device()), 'float32')
  with predictors.Predictors(tmp_path / 'model', cfg) as origin:
    hf_export.save(tmp_path / 'export', model, params, origin=origin)
  jax.tree.map(np.testing.assert_array_equal, proofs.tensors(tmp_path / 'export'), tensors)

  batch = batch_of()
  loss = programs.make_loss(model, objective(), tiny.one_device(), tiny.EXACT)
  (value, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
  main, module = reference.loss(batch)
  np.testing.assert_allclose(metrics['nll'], main.item(), rtol=1e-5)
  np.testing.assert_allclose(metrics['mtp_nll'], module.item(), rtol=1e-5)
  np.testing.assert_allclose(value, (main + WEIGHT * module).item(), rtol=1e-5)

  (main + WEIGHT * module).backward()
  parts = {name: p.grad.numpy() for name, p in reference.parts.named_parameters()}
  expected = reference.named(test_families.stored_gradients(reference.network), parts)
  exported_grads = dict(hf_export.export_tensors(tensor_layout.table(cfg), grads, np.dtype('float32')))
  for name, x in expected.items():
    assert tiny.largest(exported_grads[name] - x) <= 1e-3 * tiny.largest(x) + 1e-9, name


MESHES = (
  'latent:fsdp=2,context=2,tensor=2',
  'latent:expert=2,fsdp=2,data=2',
  'tied:fsdp=4,tensor=2',
  'hybrid:data=2,fsdp=2,tensor=2',
)


def test_mtp_on_eight_devices_matches_one_device():
  run = children.run(__file__, devices=8, timeout=600)
  assert run.stdout.split('\n')[:-1] == [f'{mesh} ok' for mesh in MESHES]
  assert 'Involuntary full rematerialization' not in run.stderr


def main():
  """Prints for each mesh whether loss and gradients equal those on one device."""
  heads = dict(num_heads=8, vocab_size=150, vocab_multiple=192, more_heads=('mtp',))
  tied = tiny.config(**heads, family='glm4_moe', num_kv_heads=4)
  models = dict(latent=tiny.latent(**heads, num_kv_heads=8), tied=tied, hybrid=tiny.hybrid(more_heads=('mtp',)))
  batch = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 2))), batch_of(rows=8))
  for text in MESHES:
    name, mesh = text.split(':')
    model = model_lib.build(models[name])
    params = tiny.params(model)

    def gradient(layout, model=model, params=params):
      loss = programs.make_loss(model, objective(), layout, tiny.EXACT)
      placed = jax.device_put(params, model.shardings(layout))
      run = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, model.shardings(layout)))
      return to_host(run(placed, layout.put(batch, 'batch', None)))

    (one_loss, _), one_grads = gradient(tiny.one_device())
    (eight_loss, _), eight_grads = gradient(make_layout(mesh, 'train'))
    errors = {'loss': abs(one_loss / eight_loss - 1)}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(eight_grads), jax.tree.leaves(one_grads)):
      errors[jax.tree_util.keystr(path)] = tiny.largest(a - b) / (tiny.largest(b) or 1)
    large_errors = {path: float(x) for path, x in errors.items() if not x <= 1e-5}
    print(text, large_errors or 'ok', flush=True)


def folder_with_module(path, family='deepseek_v3'):
  """Writes a folder for the tokenizer 'bytes' with a module, and with its copies of embedding and head."""
  tiny.folder(path, family=family, more_heads=('mtp',), num_layers=LAYERS, **HEADS.get(family, {}))
  if family == 'deepseek_v3':
    tensors = proofs.tensors(path)
    tensors |= {copy: tensors[name] for copy, name in COPIES.items()}
    safetensors.numpy.save_file(tensors, path / 'model.safetensors', metadata={'format': 'pt'})
  return str(path)


def config_of(folder, **over):
  return tiny.merged(
    tiny.run_config(folder, nll=dict(mtp_weight=WEIGHT), train=dict(steps=2), save=dict(export=True)), over
  )


def is_of_module(name):
  """Whether a tensor belongs to the module alone, and is not a copy."""
  return name.startswith(('mtp.', f'model.layers.{LAYERS}.')) and name not in COPIES


@pytest.mark.parametrize('family', ['deepseek_v3', 'qwen3_5_text'])
def test_resumed_run_is_bitwise_identical_and_exports_the_trained_module(family, tmp_path):
  folder = folder_with_module(tmp_path / 'model', family)
  before = proofs.tensors(tmp_path / 'model')
  after = proofs.check_resume(folder, tmp_path, nll=dict(mtp_weight=WEIGHT))
  assert after.keys() == before.keys()
  changed = {name for name, x in after.items() if is_of_module(name) and np.any(x != before[name])}
  unchanged = {name for name in after if is_of_module(name)} - changed
  # Adam does not change experts that no token has chosen.
  assert changed and not [x for x in unchanged if not (x.endswith('correction_bias') or '.experts.' in x)]
  assert family != 'deepseek_v3' or any('.experts.' in name for name in changed)
  if family == 'deepseek_v3':
    for copy, name in COPIES.items():
      np.testing.assert_array_equal(after[copy], after[name])
  assert json.loads((tmp_path / 'whole/export/config.json').read_text())[
    'num_nextn_predict_layers' if family == 'deepseek_v3' else 'mtp_num_hidden_layers'
  ]


def check_later_stage(folder, later):
  """Runs a stage after one that trains the module; checks that it keeps the module, and returns its export."""
  first_config = config_of(str(folder_with_module(folder / 'model')), train=dict(steps=1))
  jaxpost.run(first_config, folder / 'one')
  jaxpost.run(tiny.merged(first_config, dict(stages=('a', 'b'), a={}, b=later)), folder / 'two')
  first, second = (proofs.exported(folder / name) for name in ('one', 'two'))
  assert first.keys() == second.keys()
  module_tensors = list(filter(is_of_module, first))
  assert module_tensors and any(np.any(first[name] != second[name]) for name in first)
  jax.tree.map(
    np.testing.assert_array_equal, [first[name] for name in module_tensors], [second[name] for name in module_tensors]
  )
  return second


@pytest.mark.ci
def test_later_grpo_stage_keeps_the_module_unchanged(tmp_path):
  """The GRPO stage gives what GRPO gives that starts from the export of the first stage."""
  later = dict(algorithm='grpo', reward=tiny.low_share, train=dict(steps=1, row_length=0))
  later |= dict(rollout=dict(prompts=2, group_size=2))
  second_stage = check_later_stage(tmp_path, later)
  grpo_alone = tiny.run_config(str(tmp_path / 'one/export'), save=dict(export=True), stages=('b',), b=later)
  jaxpost.run(grpo_alone, tmp_path / 'alone')
  for name, x in proofs.exported(tmp_path / 'alone').items():
    if name not in COPIES:  # a run without the module exports it as it was stored, and its copies, too
      np.testing.assert_array_equal(second_stage[name], x, name)


@pytest.mark.parametrize('quantize', ['', 'int8'])
def test_later_lora_stage_keeps_the_module_unchanged(quantize, tmp_path):
  later = dict(lora=dict(rank=2, targets='q_a,o'), model=dict(quantize=quantize), nll=dict(mtp_weight=0.0))
  check_later_stage(tmp_path, later | dict(train=dict(steps=1)))


@pytest.mark.parametrize('over', [dict(train=dict(micro_batch_size=1)), dict(model=dict(remat='full'))])
def test_micro_batches_and_remat_change_no_mtp_metric(over, tmp_path):
  folder = folder_with_module(tmp_path / 'model')
  for name, fields in ('whole', {}), ('other', over):
    jaxpost.run(tiny.merged(config_of(folder), fields), tmp_path / name)
  whole, other = (metrics.read_rows(tmp_path / name / 'metrics.jsonl') for name in ('whole', 'other'))
  for one, two in zip(whole, other, strict=True):
    for key in one.keys() & {'loss', 'nll', 'mtp_nll', 'grad_norm'}:
      np.testing.assert_allclose(one[key], two[key], rtol=1e-5, err_msg=key)
  assert whole[0]['mtp_nll'] > 0


def test_rejection_sampling_trains_the_module(tmp_path):
  over = dict(algorithm='rft', reward=tiny.low_share, rl=dict(keep_reward=0.0), train=dict(steps=1, row_length=0))
  config = config_of(folder_with_module(tmp_path / 'model'), **over, rollout=dict(prompts=2, group_size=2))
  jaxpost.run(config, tmp_path / 'run')
  assert metrics.read_rows(tmp_path / 'run/metrics.jsonl')[0]['mtp_nll'] > 0


@pytest.mark.parametrize('make', [tiny.latent, tiny.hybrid])
def test_flops_of_the_module_count_only_if_it_is_trained(make):
  cfg = make(more_heads=('mtp',))
  plain = model_lib.build(dataclasses.replace(cfg, more_heads=()))
  trained, untrained = (model_lib.freeze(model_lib.build(cfg), '', trains_mtp) for trains_mtp in (True, False))
  assert untrained.flops_of_update(10) == plain.flops_of_update(10)

  share = cfg.experts.top_k / cfg.experts.num if cfg.experts else 1
  rows = {path: spec for path, spec in trained.table.items() if path.startswith('mtp/')}
  used = sum(math.prod(x.shape) * (share if 'expert' in x.axes else 1) for x in rows.values())
  attention = 2 * cfg.num_heads * cfg.layer_widths[list(cfg.layer_stacks).index('layers')] * 10
  head = 2 * cfg.padded_vocab_size * cfg.hidden_size
  expected = plain.flops_of_update(10) + 3 * (2 * used + attention + head)
  np.testing.assert_allclose(trained.flops_of_update(10), expected, rtol=1e-6)


def test_custom_model_may_have_a_layer_called_mtp():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, segment_ids):
      del positions, segment_ids
      return nn.Dense(8, name='mtp')(nn.Embed(16, 8, name='embed')(tokens))

  model = model_lib.freeze(custom.linen(Net(), vocab_size=16, head='embed/embedding'), '')
  assert not model.frozen and not model.trains_mtp and model.flops_of_update(10) > 0


def test_saved_config_of_an_older_version_restores_its_value_head():
  cfg = tiny.config()
  fields = json.loads(json.dumps(dataclasses.asdict(cfg)))
  del fields['more_heads']
  assert decoder_configs.from_json(fields | dict(value_head=True)) == model_lib.with_value_head(cfg, True)
  assert decoder_configs.from_json(fields | dict(value_head=False)) == cfg


def test_export_config_counts_a_module_that_the_base_folder_lacks(tmp_path):
  """The weights of a run may have a module that the folder in `model.path` lacks."""
  folder = pathlib.Path(tiny.folder(tmp_path / 'model', family='deepseek_v3', num_layers=LAYERS, num_kv_heads=2))
  cfg = hf.read_config(folder)
  model = model_lib.build(dataclasses.replace(cfg, more_heads=('mtp',)))
  with predictors.Predictors(folder, model.config) as origin:
    hf_export.save(tmp_path / 'export', model, tiny.params(model), origin=origin)
  assert predictors.with_module(hf.read_config(tmp_path / 'export'), tmp_path / 'export', KEY) == model.config


def test_float8_module_is_not_exported(tmp_path, caplog):
  """An export would lack the scales of its blocks."""
  folder_with_module(tmp_path / 'model', 'qwen3_5_text')
  with multimodal.Origin(tmp_path / 'model') as origin:
    tensors = origin.others((), '')
    assert tensors and origin.without_float8(tensors) == tensors
    name, tensor = next(iter(tensors.items()))
    assert not origin.without_float8({name: dataclasses.replace(tensor, dtype='F8_E4M3')})
  assert 'are in float8' in caplog.text


def test_module_of_a_multimodal_folder_is_trained_and_exported(tmp_path):
  """The names of its tensors have no prefix there, unlike those of the language model."""
  folder_with_module(tmp_path / 'text', 'qwen3_5_text')
  target = tmp_path / 'model'
  target.mkdir()
  renamed = {
    name.replace('model.', 'model.language_model.', 1): x for name, x in proofs.tensors(tmp_path / 'text').items()
  }
  renamed['model.visual.patch.weight'] = np.arange(6, dtype=np.float32).reshape(2, 3)
  safetensors.numpy.save_file(renamed, target / 'model.safetensors', metadata={'format': 'pt'})
  text = json.loads((tmp_path / 'text/config.json').read_text())
  outer = dict(model_type='qwen3_5', text_config=text, vision_config=dict(depth=2), tie_word_embeddings=True)
  (target / 'config.json').write_text(json.dumps(outer | dict(architectures=['Qwen3_5ForConditionalGeneration'])))
  jaxpost.run(config_of(str(target), model=dict(text_only=True)), tmp_path / 'run')
  after = proofs.exported(tmp_path / 'run')
  assert after.keys() == renamed.keys()
  np.testing.assert_array_equal(after['model.visual.patch.weight'], renamed['model.visual.patch.weight'])
  assert all(np.any(after[name] != renamed[name]) for name in after if name.startswith('mtp.'))


@pytest.mark.parametrize(
  'family,over,text',
  [
    ('qwen3', {}, 'not in qwen3, whose module has other layers or names; set it to 0'),
    ('deepseek_v32', {}, 'not in deepseek_v32'),
    ('qwen3_5_text', {}, 'has no module'),
    ('deepseek_v3', dict(algorithm='dpo'), 'dpo would ignore it'),
    ('deepseek_v3', dict(model=dict(quantize='int8'), lora=dict(rank=2)), 'trains all of a module'),
    ('deepseek_v3', dict(num_nextn_predict_layers=2), 'has 2 modules'),
    ('qwen3_5_text', dict(mtp_use_dedicated_embeddings=True), 'mtp_use_dedicated_embeddings=true of .* is not built'),
    ('deepseek_v3', dict(lora=dict(rank=2)), 'trains all of a module; set config.lora.rank=0'),
    ('deepseek_v3', dict(train=dict(freeze='mtp/.*')), 'this stage trains no module'),
    ('deepseek_v3', dict(init_from='RUN'), 'these weights are of a run without a module'),
  ],
)
def test_unsupported_mtp_config_is_refused_with_its_reason(family, over, text, tmp_path):
  folder = tiny.folder(tmp_path / 'model', family=family, num_layers=LAYERS, **HEADS.get(family, {}))
  if over.get('init_from'):
    over = dict(init_from=str(tmp_path / 'run'))
    jaxpost.run(tiny.run_config(folder, train=dict(steps=1)), tmp_path / 'run')
  elif family == 'deepseek_v3' or 'mtp_use_dedicated_embeddings' in over:
    folder = folder_with_module(tmp_path / 'with', family)
  fields = {name: over[name] for name in over if name not in config_lib.defaults()}
  if fields:
    path = pathlib.Path(folder) / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    over = {}
  with pytest.raises(InputError, match=f'^{KEY}: .*{text}'):
    jaxpost.run(config_of(folder, **over), tmp_path / 'refused')


if __name__ == '__main__':
  main()
