"""Tests of LoRA adapters: their forward pass and gradients, the parts that are trained and saved, and PEFT folders.

Legend: B rows, T tokens, V vocabulary.
"""

import dataclasses
import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import safetensors.numpy
import tiny

from jaxpost import stages, types
from jaxpost.errors import InputError
from jaxpost.formats import hf, hf_export, peft, tensor_layout
from jaxpost.models import lora, parameters
from jaxpost.models import model as model_lib
from jaxpost.models.parameters import leaf
from jaxpost.monitor import metrics
from jaxpost.programs import reshard, train
from jaxpost.programs.compile import Ledger
from jaxpost.stage import assemble, model_folders, place, prepare
from jaxpost.stage import config as config_lib
from jaxpost.storage.manifest import finished_steps
from jaxpost.tools import inference
from jaxpost.types import Batch

ALL = 'q|k|v|o|gate|up|down'
SUMS = 'generated:arithmetic:max=99,ops=+,split={},size=40'
PAIRS = 'generated:arithmetic_pairs:max=99,split=train,size=60'
SHAPES = {'qwen3': dict(), 'llama': dict(family='llama', qk_norm=False, tie_embeddings=False)}


def config(targets=ALL, rank=3, rslora=False, **fields):
  return tiny.config(lora=(rank, 5.0, rslora, targets), **fields)


def params_of(model, seed=0, b=0.2):
  """Returns random parameters, with matrices B of the adapters that are not 0."""
  random = np.random.RandomState(seed)
  params = tiny.params(model, seed)
  for pair in params[parameters.ADAPTER_ROOT]['layers'].values():
    pair['b'] = jnp.asarray(b * random.standard_normal(pair['b'].shape).astype(np.float32))
  return params


def without(params):
  return {k: v for k, v in params.items() if k != parameters.ADAPTER_ROOT}


def logits(model, params, ids, compute=tiny.EXACT):
  """Returns the logits of this model. `tiny.logits` would build another model from its config."""
  positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
  x = jax.jit(functools.partial(model.forward, compute=compute))(params, ids, positions, np.ones_like(ids))
  out = jnp.einsum('btd,vd->btv', x.astype(jnp.float32), model.head(params), precision='highest')
  return np.asarray(out)[..., : model.config.vocab_size]


def near(one, two, tolerance=3e-5):
  assert tiny.largest(np.subtract(one, two)) <= tolerance * tiny.largest(two)


# ----------------------------------------------------------------- forward pass


def test_rank_0_leaves_the_model_unchanged():
  model = model_lib.build(tiny.config())
  assert model.table == model_lib.build(tiny.config()).table
  frozen = model_lib.freeze(model, '')
  assert not frozen.frozen and model_lib.trained_part(frozen).table == model.table


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('unroll', [True, False])
def test_new_adapters_do_not_change_the_logits(dtype, unroll):
  model = model_lib.build(config())
  compute = dataclasses.replace(tiny.EXACT, dtype=dtype, residual=dtype, unroll=unroll)
  params, ids = tiny.params(model), tiny.tokens((2, 9))
  assert all(np.any(p['a']) and not np.any(p['b']) for p in params[parameters.ADAPTER_ROOT]['layers'].values())
  # The tolerance allows for XLA fusing the two programs differently.
  near(
    logits(model, params, ids, compute),
    logits(model.base, without(params), ids, compute),
    {'float32': 2e-6, 'bfloat16': 1e-2}[dtype],
  )


@pytest.mark.parametrize('unroll', [True, False])
@pytest.mark.parametrize('targets, rslora', [(ALL, False), ('layers/[qo]', True)])
def test_merged_weights_have_the_logits_of_the_adapters(targets, rslora, unroll):
  model = model_lib.build(config(targets, rslora=rslora))
  compute = dataclasses.replace(tiny.EXACT, unroll=unroll, remat='full')
  params, ids = params_of(model), tiny.tokens((2, 9))
  merged = model.merge(params)
  assert merged.keys() == without(params).keys()
  with_adapters = logits(model, params, ids, compute)
  near(with_adapters, logits(model.base, merged, ids, compute))
  plain = logits(model.base, without(params), ids, compute)
  assert tiny.largest(with_adapters - plain) > 0.1 * tiny.largest(plain)


def test_lora_a_is_initialized_as_in_peft():
  model = model_lib.build(config(rank=8))
  adapters = model.init(jax.random.key(0))[parameters.ADAPTER_ROOT]['layers']
  for name, inputs in {'q': 32, 'o': 4 * 8, 'down': 48}.items():
    a, bound = np.asarray(adapters[name]['a']), 1 / math.sqrt(inputs)
    assert 0.9 * bound < a.max() <= bound and -bound <= a.min() < -0.9 * bound
    assert np.std(a) == pytest.approx(bound / math.sqrt(3), rel=0.15)


def test_adapters_are_sharded_as_their_matrices():
  rows = model_lib.build(config()).table
  assert rows['lora/layers/o/a'].axes == ('layers', 'heads', None, None)
  assert rows['lora/layers/o/b'].axes == ('layers', 'rank', 'embed')
  assert rows['lora/layers/o/a'].shape == (2, 4, 8, 3)
  assert rows['lora/layers/gate/b'].shape == (2, 3, 48)


# -------------------------------------------------------------------- dropout


def rows_batch(shape=(4, 12)):
  positions = np.broadcast_to(np.arange(shape[1]), shape).astype(np.int32)
  segments = np.ones(shape, np.int32)
  weights = np.full(shape, 1 / math.prod(shape), np.float32)
  return Batch(tiny.tokens(shape), positions, segments, loss_weights=weights)


def gradient(model, params, batch, micro, step=0, unroll=True):
  loss = train.make_loss(
    model,
    types.Objective(lambda o, a: (-o.logprobs, {})),
    tiny.one_device(),
    dataclasses.replace(tiny.EXACT, unroll=unroll),
  )
  trained, frozen = model_lib.split(params, model)
  split = jax.tree.map(lambda x: jnp.reshape(x, (-1, micro, *x.shape[1:])), batch)
  return jax.jit(lambda p, b: train.accumulate(lambda p, m: loss(p, m, step, {'params': frozen}), p, b))(trained, split)


def test_dropout_keeps_the_mean():
  x = jnp.ones((2, 500, 4))
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2))
  adapted = lora.Adapted(jnp.zeros((4, 4)), jnp.eye(4), jnp.eye(4), keys, scale=2.0, rate=0.3)
  y = np.asarray(adapted.product('btd,df->btf', x, 'float32'))
  assert np.mean(y == 0) == pytest.approx(0.3, abs=0.03)
  np.testing.assert_allclose(y[y != 0], 2 / 0.7, rtol=1e-6)
  assert np.any((y[0] == 0) != (y[1] == 0))


@pytest.mark.parametrize('unroll', [True, False])
def test_dropout_depends_on_tokens_and_step_but_not_on_row_order(unroll):
  model = model_lib.freeze(model_lib.build(config('q|o'), dropout=0.4), '')
  params, batch = params_of(model), rows_batch()
  (one, _), grads = gradient(model, params, batch, 4)
  (two, _), reversed_grads = gradient(model, params, jax.tree.map(lambda x: x[::-1], batch), 2, unroll=unroll)
  assert float(one) == pytest.approx(float(two), rel=1e-6)
  jax.tree.map(lambda a, b: near(a, b, 1e-5), grads, reversed_grads)
  without_dropout = gradient(dataclasses.replace(model, dropout=0.0), params, batch, 4)
  next_step = gradient(model, params, batch, 4, step=1)
  assert len({round(float(x), 6) for x in (one, without_dropout[0][0], next_step[0][0])}) == 3
  # Where adapters change little, their dropout does, too.
  weak = params_of(model, b=1e-3)
  near(
    gradient(model, weak, batch, 4)[0][0], gradient(dataclasses.replace(model, dropout=0.0), weak, batch, 4)[0][0], 1e-3
  )


# ------------------------------------------------------------------------ peft


@pytest.fixture(scope='module', params=SHAPES)
def based(request, tmp_path_factory):
  """Returns the folder of a base model and its ModelConfig."""
  folder = tmp_path_factory.mktemp('base') / request.param
  cfg = tiny.config(**SHAPES[request.param])
  model = model_lib.build(cfg)
  hf_export.save(folder, model, tiny.params(model))
  return folder, cfg


def torch_model(folder, **fields):
  """Returns the base model in `transformers` with an adapter of `peft` whose weights are all random."""
  torch = pytest.importorskip('torch', reason='parity with peft needs torch')
  library = pytest.importorskip('peft', reason='peft is not installed')
  from transformers import AutoModelForCausalLM

  network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
  network = library.get_peft_model(
    network, library.LoraConfig(**{**dict(task_type='CAUSAL_LM', r=3, lora_alpha=5), **fields})
  )
  torch.manual_seed(0)
  with torch.no_grad():
    for name, p in network.named_parameters():
      if 'lora_' in name:
        p.copy_(0.2 * torch.randn_like(p))
  return network.train()


def load(folder, adapter, cfg):
  """Returns the model and the parameters of a base folder with an adapter folder."""
  layout = tiny.one_device()
  model = model_lib.freeze(model_lib.build(dataclasses.replace(cfg, lora=peft.read_spec(adapter, cfg))), '')
  params = hf.load_params(folder, model.base, model.base.shardings(layout), 'float32')
  return model, params | peft.load(adapter, model, model.shardings(layout))


@pytest.mark.parametrize(
  'fields', [dict(target_modules='all-linear'), dict(target_modules=['q_proj', 'down_proj'], use_rslora=True)]
)
def test_peft_folder_has_the_logits_and_gradients_of_peft(based, tmp_path, fields):
  torch = pytest.importorskip('torch', reason='parity with peft needs torch')
  folder, cfg = based
  network = torch_model(folder, **fields)
  network.save_pretrained(tmp_path)
  model, params = load(folder, tmp_path, cfg)
  ids = tiny.tokens((2, 10))
  near(logits(model, params, ids), tiny.torch_logits(network, ids))

  batch = rows_batch((2, 10))
  ids = torch.tensor(batch.tokens).long()
  logp = network(input_ids=ids).logits[:, :-1].log_softmax(-1)
  loss = -logp.gather(-1, ids[:, 1:, None]).sum() / ids.numel()
  loss.backward()
  (value, _), grads = gradient(
    model,
    params,
    Batch(batch.tokens, batch.positions, batch.segment_ids, batch.loss_weights * (batch.positions > 0)),
    2,
  )
  assert float(value) == pytest.approx(loss.item(), rel=1e-5)
  theirs = {name.replace('.default', ''): p.grad.numpy() for name, p in network.named_parameters() if p.requires_grad}
  ours = dict(
    hf_export.export_tensors(tensor_layout.table(model.config, model_lib.trained_part(model).table), grads, np.float32)
  )
  assert ours.keys() == theirs.keys()
  for name in ours:
    near(ours[name], theirs[name], 1e-3)


def read_by_peft(based, out, targets, rslora):
  """Writes adapters, checks the logits of `peft` with them, and returns the model and the parameters read again."""
  pytest.importorskip('torch', reason='parity with peft needs torch')
  library = pytest.importorskip('peft', reason='peft is not installed')
  from transformers import AutoModelForCausalLM

  folder, cfg = based
  model = model_lib.build(dataclasses.replace(cfg, lora=(3, 5.0, rslora, targets)))
  params = params_of(model) | hf.load_params(folder, model.base, model.base.shardings(tiny.one_device()), 'float32')
  peft.writer(model, params, str(folder))(out)
  network = library.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out)
  ids = tiny.tokens((2, 10))
  near(logits(model, params, ids), tiny.torch_logits(network, ids))
  again, read = load(folder, out, cfg)
  jax.tree.map(np.testing.assert_array_equal, read, params)
  assert lora.scale(again.config) == pytest.approx(lora.scale(model.config))
  return again, read


@pytest.mark.parametrize('rslora', [False, True])
def test_peft_loads_written_adapters(based, tmp_path, rslora):
  again, read = read_by_peft(based, tmp_path / 'adapter', 'v|o|up', rslora)
  assert again.config.lora == (3, 5.0, rslora, 'v|o|up')
  # `transformers` finds the base by the name in the adapter folder.
  from transformers import AutoModelForCausalLM

  network = AutoModelForCausalLM.from_pretrained(tmp_path / 'adapter')
  ids = tiny.tokens((2, 10))
  near(tiny.torch_logits(network, ids), logits(again, read, ids))


FUSED = dict(family='phi3', qk_norm=False, tie_embeddings=False)


@pytest.fixture(scope='module')
def phi(tmp_path_factory):
  """Returns the same as `based`, of a family that stores q, k and v in one tensor, and gate and up in another."""
  folder, cfg = tmp_path_factory.mktemp('phi') / 'base', tiny.config(**FUSED)
  model = model_lib.build(cfg)
  hf_export.save(folder, model, tiny.params(model))
  return folder, cfg


@pytest.mark.parametrize(
  'fields', [dict(target_modules='all-linear'), dict(target_modules=['qkv_proj'], use_rslora=True)]
)
def test_peft_adapter_of_matrices_in_one_tensor_has_the_logits_of_peft(phi, tmp_path, fields):
  """In an adapter of `peft`, the matrices in one tensor share A."""
  folder, cfg = phi
  network = torch_model(folder, **fields)
  network.save_pretrained(tmp_path)
  model, params = load(folder, tmp_path, cfg)
  ids = tiny.tokens((2, 10))
  near(logits(model, params, ids), tiny.torch_logits(network, ids))
  q, k = (params['lora']['layers'][n]['a'] for n in 'qk')
  np.testing.assert_array_equal(q.reshape(k.shape), k)


@pytest.mark.parametrize('rslora', [False, True])
@pytest.mark.parametrize('targets', ['q|k|v', 'o|gate|up', ALL])
def test_peft_loads_adapters_of_matrices_in_one_tensor(phi, tmp_path, targets, rslora):
  """Each matrix here has an A of its own, and these are written side by side."""
  read_by_peft(phi, tmp_path / 'adapter', targets, rslora)


def test_adapter_that_mixes_matrices_in_one_tensor_is_refused(phi, tmp_path):
  folder, cfg = phi
  model = model_lib.build(dataclasses.replace(cfg, lora=(2, 4.0, False, 'q|k|v')))
  peft.writer(model, params_of(model), str(folder))(tmp_path)
  file = tmp_path / 'adapter_model.safetensors'
  tensors = dict(safetensors.numpy.load_file(file))
  name = 'base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight'
  assert not tensors[name][0, 2:].any()
  tensors[name][0, 2] = 1.0
  (tmp_path / 'checksums.json').unlink()  # else the change would be reported as damage
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(InputError, match='qkv_proj.* mixes the matrices in it'):
    load(folder, tmp_path, cfg)


@pytest.mark.parametrize('targets', ['q', 'q|o', 'gate'])
def test_adapter_of_some_of_the_matrices_in_one_tensor_is_not_written(caplog, targets):
  """`peft` has one adapter for q, k and v of Phi-3 together."""
  model = model_lib.build(tiny.config(lora=(2, 4.0, False, targets), **FUSED))
  assert peft.writer(model, params_of(model), 'base') is None
  assert 'matrices in one tensor; for `peft`, all need adapters' in caplog.text


def test_adapter_without_a_named_base_is_not_written(caplog):
  """`peft` could not load the base by name if its weights were drawn at random."""
  model = model_lib.build(tiny.config(lora=(2, 4.0, False, 'q')))
  assert peft.writer(model, {}, '') is None and 'its base model has no name' in caplog.text
  assert 'set model.path, not init_from' in caplog.text


def test_sampled_weights_are_not_rounded_to_the_type_of_the_base():
  """The trainer adds adapters to a bfloat16 base in float32, and so does a sampler that computes in float32."""
  model = model_lib.build(tiny.config(lora=(2, 4.0, False, 'o')))
  params = params_of(model)
  base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), without(params)) | {'lora': params['lora']}
  weights = reshard.Reshard(model, tiny.one_device('rollout'), tiny.EXACT, Ledger())(base)
  expected = model.merge(jax.tree.map(lambda x: x.astype(jnp.float32), base))['layers']['o']
  np.testing.assert_array_equal(np.stack([layer['o'] for layer in weights['layers']]), expected)


# ------------------------------------------------------------------------ runs


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('model') / 'nano', num_layers=2)


def sft(base, **over):
  return tiny.run_config(
    base,
    **tiny.merged(
      dict(
        lora=dict(rank=2),
        train=dict(steps=4),
        save=dict(every=2, export=True),
        eval=dict(every=2, samples=2, size=4, data=dict(path=SUMS.format('test'))),
        reward='exact_match',
      ),
      over,
    ),
  )


def run(config, workdir):
  stages.run(config, workdir, rich.console.Console(quiet=True))
  return metrics.comparable_rows(workdir / 'metrics.jsonl')


def seal(workdir, stage, step=None):
  """Returns the seal of a checkpoint of a stage, by default of the last one."""
  folder = workdir / 'checkpoints' / stage
  seal_text = (folder / str(step or max(finished_steps(folder))) / 'checksums.json').read_bytes().partition(b'\n')[2]
  return json.loads(seal_text)


def parts(config):
  """Returns the kit, the roles and the stream of a stage before its first step."""
  kit = place.place_stage(prepare.prepare_all(config)[0])
  roles, stream, _ = assemble.make_parts(kit, stages.initial_params(kit, None))
  return kit, roles, stream


def of_folder(folder):
  """Loads a model folder as the runs of this file do."""
  config = config_lib.parse(sft(''))['sft']
  return inference.from_folder(str(folder), config)


def text_logits(model, params):
  return logits(model, params, tiny.tokens((2, 12), 259))


@pytest.fixture(scope='module')
def trained(base, tmp_path_factory):
  """Returns the folder of an SFT run with adapters."""
  workdir = tmp_path_factory.mktemp('runs') / 'sft'
  rows = run(sft(base, lora=dict(dropout=0.1)), workdir)
  losses = [r['loss'] for r in rows if r['split'] == 'train']
  assert len(set(losses)) == 4
  return workdir


def test_only_adapters_have_optimizer_state_and_are_updated(base):
  _, roles, stream = parts(sft(base))
  policy = roles.policy
  try:
    base_params = policy.frozen['params']
    before = jax.tree.map(np.asarray, base_params)
    addresses, trained = tiny.pointers(base_params), jax.tree.leaves(policy.state.params)
    for _ in range(2):
      figures = policy.update(next(stream).updates[0][1])
  finally:
    stream.close()
  assert float(figures['grad_norm']) > 0 and list(policy.state.params) == ['lora']
  assert tiny.pointers(policy.frozen['params']) == addresses  # the updates did not donate them
  jax.tree.map(np.testing.assert_array_equal, before, policy.frozen['params'])
  num_trained = sum(x.size for x in trained)
  moments = [x for x in jax.tree.leaves(policy.state.opt_state) if x.ndim]
  assert sum(x.nbytes for x in moments) == 2 * 4 * num_trained
  assert num_trained == 2 * 2 * sum((16 + 16, 16 + 8, 16 + 8, 16 + 16, 3 * (16 + 16)))
  assert all(np.any(p['b']) for p in policy.params['lora']['layers'].values())


@pytest.mark.core
def test_checkpoint_does_not_contain_base_weights(trained):
  leaves = seal(trained, 'sft')['leaves']
  params = {k for k in leaves if k.startswith('policy/params/')}
  assert params and all('/lora/' in k for k in params)
  floats = [s for s, _ in leaves.values() if s]
  assert sum(map(math.prod, floats)) == 3 * sum(math.prod(leaves[k][0]) for k in params)


def test_run_exports_merged_weights_and_an_adapter(base, trained):
  weights = inference.from_run(trained)
  assert weights.step == 4
  expected = text_logits(weights.inputs.model, weights.params)
  base_model = of_folder(base)
  assert tiny.largest(expected - text_logits(base_model.inputs.model, base_model.params)) > 1e-3
  # The merged folder and the adapter folder are loaded as models, and the adapter as the start of a stage.
  for source in ('export', 'export/adapter'):
    exported = of_folder(trained / source)
    assert not exported.inputs.model.config.lora
    near(text_logits(exported.inputs.model, exported.params), expected)
  _, roles, stream = parts(sft(base, lora=dict(rank=0, path=str(trained / 'export/adapter'))))
  stream.close()
  near(text_logits(roles.policy.model, roles.policy.params), expected)
  assert roles.policy.model.config.lora == (2, 16.0, False, ALL)


def test_resume_is_exact_and_refuses_a_changed_base(base, trained, tmp_path):
  copied_base = shutil.copytree(base, tmp_path / 'base')
  first_half = sft(str(copied_base), lora=dict(dropout=0.1), train=dict(steps=2))
  run(first_half, tmp_path / 'run')
  whole = tiny.merged(first_half, dict(train=dict(steps=4)))
  rows = run(whole, tmp_path / 'run')

  def train_rows(rows):
    return [r for r in rows if r['split'] == 'train']

  assert train_rows(rows) == train_rows(metrics.comparable_rows(trained / 'metrics.jsonl'))
  files = [d / 'export/model.safetensors' for d in (trained, tmp_path / 'run')]
  assert files[0].read_bytes() == files[1].read_bytes()
  model = model_lib.build(hf.read_config(copied_base))
  hf_export.save(copied_base, model, tiny.params(model, seed=7))
  with pytest.raises(InputError, match='have changed since'):
    run(tiny.merged(whole, dict(train=dict(steps=5))), tmp_path / 'run')
  with pytest.raises(InputError, match='gone or has changed'):
    inference.from_run(tmp_path / 'run')


def test_parameters_that_match_freeze_are_not_trained(base, tmp_path):
  run(sft(base, lora=dict(rank=0), train=dict(freeze='embed|layers/.*norm|norm')), tmp_path)
  params = {k.split('/params/')[1] for k in seal(tmp_path, 'sft')['leaves'] if '/params/' in k}
  assert params == {f'layers/{n}' for n in ALL.split('|')}
  before, after = of_folder(base), inference.from_run(tmp_path)
  for path in before.inputs.model.table:
    same = np.array_equal(leaf(before.params, path), leaf(after.params, path))
    assert same == (path not in params), path


@pytest.mark.parametrize('algorithm', ['sft', 'dpo', 'orpo'])
def test_dropout_is_drawn_from_the_seed_of_the_run(base, algorithm):
  path = dict() if algorithm == 'sft' else dict(path=PAIRS)
  config = sft(base, algorithm=algorithm, seed=5, lora=dict(dropout=0.1), data=path, eval=dict(data=dict(path='')))
  assert place.place_stage(prepare.prepare_all(config)[0]).objectives['policy'].seed == 5


def test_dpo_reference_shares_the_base_weights_of_the_policy(base):
  over = dict(
    algorithm='dpo',
    data=dict(path=PAIRS),
    train=dict(batch_size=4, row_length=96),
    eval=dict(data=dict(path=''), samples=0),
  )
  kit, roles, stream = parts(sft(base, **over))
  try:
    policy, reference = roles.policy, roles.reference
    base_addresses = tiny.pointers(policy.frozen['params'])
    assert base_addresses <= tiny.pointers(reference.params)
    copied = [x for x in jax.tree.leaves(reference.params) if x.unsafe_buffer_pointer() not in base_addresses]
    assert sum(x.nbytes for x in copied) == sum(x.nbytes for x in jax.tree.leaves(policy.state.params))
    batch = policy.place(kit.data.first_batch)
    start = np.asarray(reference(batch).logprobs)
    np.testing.assert_array_equal(start, policy.score(batch).logprobs)
    for _ in range(2):
      policy.update(next(stream).updates[0][1])
    np.testing.assert_array_equal(start, reference(batch).logprobs)
    assert tiny.largest(start - policy.score(batch).logprobs) > 1e-4
  finally:
    stream.close()


def test_grpo_learns_with_adapters(base, tmp_path):
  """The checks of the first step pass: the ratio is 1, and the sampler agrees with the trainer."""
  rows = run(
    tiny.grpo_config(
      base,
      lora=dict(rank=4),
      rl=dict(kl_coef=0.01),
      optim=dict(lr=2e-2),
      rollout=dict(prompts=8, group_size=8),
      train=dict(steps=12),
    ),
    tmp_path,
  )
  rewards = [r['reward'] for r in rows if r['split'] == 'train']
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
  for row in rows[-3:]:
    assert row['sampler_mismatch'] == pytest.approx(1, abs=1e-3)
    assert row['kl'] > 0


def test_ppo_and_a_reward_model_train_adapters(base, tmp_path):
  run(
    tiny.merged(
      sft(base),
      dict(
        algorithm='reward_model',
        data=dict(path=PAIRS),
        train=dict(batch_size=4, row_length=96),
        eval=dict(data=dict(path=''), samples=0),
      ),
    ),
    tmp_path / 'rm',
  )
  leaves = seal(tmp_path / 'rm', 'reward_model')['leaves']
  assert 'policy/params/score' in leaves
  assert 'policy/params/lora/layers/q/a' in leaves
  assert 'policy/params/embed' not in leaves
  saved = json.loads((tmp_path / 'rm/export/adapter' / peft.CONFIG).read_text())
  assert saved['modules_to_save'] == ['score']
  # `peft` writes these where a user names the head, and where not.
  for heads in ['classifier', 'score'], ['score', 'classifier', 'score']:
    (tmp_path / 'rm/export/adapter' / peft.CONFIG).write_text(json.dumps(saved | {'modules_to_save': heads}))
    read = model_folders.with_adapter(hf.read_config(base), tmp_path / 'rm/export/adapter')
    assert read.num_labels == 1 and read.lora[0] == saved['r']
  run(tiny.grpo_config(base, algorithm='ppo', lora=dict(rank=2), train=dict(steps=2)), tmp_path / 'ppo')
  leaves = seal(tmp_path / 'ppo', 'ppo')['leaves']
  assert 'policy/params/lora/layers/q/a' in leaves
  assert {'critic/params/score', 'critic/params/lora/layers/q/a'} <= set(leaves)
  assert 'critic/params/embed' not in leaves
  _, roles, stream = parts(tiny.grpo_config(base, algorithm='ppo', lora=dict(rank=2)))
  stream.close()
  both = [tiny.pointers(r.frozen['params']) for r in roles.trainable.values()]
  assert both[0] == both[1]
  assert not np.any(both[0] & tiny.pointers(roles.critic.state.params))


# The second stage trains the same adapters, or merges them and trains others, or all weights.
@pytest.mark.parametrize(
  'second', [dict(), dict(lora=dict(rank=3)), dict(lora=dict(rank=0, dropout=0.0))], ids=['same', 'other', 'whole']
)
def test_stages_continue_merge_or_replace_adapters(base, tmp_path, second):
  def made(steps):
    return sft(
      base,
      stages=('one', 'two'),
      one=dict(),
      lora=dict(dropout=0.1),
      eval=dict(data=dict(path=''), samples=0),
      two=tiny.merged(
        dict(algorithm='dpo', data=dict(path=PAIRS), train=dict(steps=steps, batch_size=4, row_length=96)), second
      ),
    )

  run(made(4), tmp_path / 'at_once')
  run(made(2), tmp_path / 'halves')
  shutil.rmtree(tmp_path / 'halves/export')
  run(made(4), tmp_path / 'halves')  # reads the first stage from the disk
  files = [tmp_path / d / 'export/model.safetensors' for d in ('at_once', 'halves')]
  assert files[0].read_bytes() == files[1].read_bytes()
  trained = inference.from_run(tmp_path / 'halves')
  exported = of_folder(tmp_path / 'halves/export')
  near(text_logits(exported.inputs.model, exported.params), text_logits(trained.inputs.model, trained.params))
  # A folder for peft needs a base model with a name.
  assert (tmp_path / 'halves/export/adapter').exists() == (second == {})


def test_run_starts_from_a_checkpoint_of_another_run(base, trained):
  _, roles, stream = parts(sft(base, init_from=f'{trained}@2'))
  stream.close()
  at_step_2 = inference.from_run(trained, step=2)
  np.testing.assert_array_equal(
    text_logits(at_step_2.inputs.model, at_step_2.params), text_logits(roles.policy.model, roles.policy.params)
  )


def test_initial_parameters_are_rounded_to_the_type_of_the_stage(base, trained):
  """Parameters of a checkpoint, and those of the stage before, are rounded to the type of this stage."""
  _, at, stream = parts(sft(base, init_from=f'{trained}@2'))
  stream.close()
  _, roles, stream = parts(tiny.merged(sft(base, init_from=f'{trained}@2'), dict(model=dict(param_dtype='bfloat16'))))
  stream.close()
  unrounded, loaded = (parameters.flatten(x.policy.params) for x in (at, roles))
  model = roles.policy.model
  layout = roles.policy.layout
  adopted = parameters.flatten(model_lib.adopt(at.policy.params, at.policy.model, model, layout, 'bfloat16'))
  for path, x in unrounded.items():
    rounded = x.astype(model.table[path].dtype or 'bfloat16')
    for y in (loaded[path], adopted[path]):
      assert y.dtype == rounded.dtype, path
      np.testing.assert_array_equal(*(np.asarray(z, np.float32) for z in (y, rounded)), err_msg=path)


@pytest.mark.nightly
def test_a_critic_shares_no_array_that_the_policy_trains(base, tmp_path):
  """The embedding is trained beside the adapters, so each update donates its buffer."""
  config = tiny.grpo_config(base, algorithm='ppo', lora=dict(rank=2), train=dict(steps=2))
  config['train']['freeze'] = '(?!lora/|embed).*'
  assert [row['step'] for row in run(config, tmp_path) if row['split'] == 'train'] == [1, 2]


def test_sft_gsm8k_recipe_with_lora_rank_16():
  from configs import sft_gsm8k

  parsed = config_lib.parse(sft_gsm8k.get_config('lora=16').to_dict())['sft']
  assert (parsed.lora.rank, parsed.lora.alpha) == (16, 32.0)
  assert parsed.model.param_dtype == 'bfloat16'
  assert not config_lib.parse(sft_gsm8k.get_config().to_dict())['sft'].lora.rank


# ------------------------------------------------------------------- bad input


def adapter(folder, base, cfg=None, **changes):
  """Writes an adapter folder for a model, with some fields of its config changed."""
  cfg = cfg or hf.read_config(base)
  model = model_lib.build(dataclasses.replace(cfg, lora=(2, 16.0, False, ALL)))
  peft.writer(model, params_of(model), str(base))(folder)
  path = folder / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  return str(folder)


@pytest.mark.parametrize(
  'over, text',
  [
    (dict(lora=dict(targets='query')), "targets: 'query' matches none of layers/q, "),
    (dict(lora=dict(targets='q_proj,foo_proj')), "targets: 'foo_proj' matches none of layers/q, "),
    (dict(lora=dict(targets='(q')), 'targets: .* is not a regular expression'),
    (dict(lora=dict(rank=9)), r'rank: 9 is larger than layers/k, .* at most 8'),
    (dict(lora=dict(dropout=0.1), algorithm='grpo', reward='exact_match'), 'lora.dropout: an on-policy method'),
    (dict(train=dict(freeze='heads')), "freeze: 'heads' matches none of embed"),
    (dict(train=dict(freeze='.*')), "freeze: '.*' leaves nothing to train"),
    (dict(train=dict(freeze='[')), 'freeze: .* is not a regular expression'),
  ],
)
def test_bad_config_is_one_line(base, over, text):
  with pytest.raises(InputError, match=text) as error:
    prepare.prepare_all(sft(base, **over))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'changes, text',
  [
    (dict(use_dora=True), 'use_dora=True is not supported'),
    (dict(init_lora_weights='pissa'), "weights='pissa' is not supported"),
    (dict(rank_pattern={'q_proj': 4}), 'rank_pattern=.* is not supported'),
    (dict(rank_pattern={'q_proj': 4}, r=None), 'r=None and'),
    (dict(rank_pattern=['q_proj']), 'rank_pattern=.* must be an object'),
    (dict(target_parameters='q'), "target_parameters='q' must be a list"),
    (dict(target_parameters=[5]), r'target_parameters=\[5\] must be a list'),
    (dict(r=0), 'r=0 and'),
    (dict(r=4), r'has shape \[2, 16\], not \[4, 16\]'),
    (dict(peft_type='IA3'), "peft_type='IA3'"),
  ],
)
def test_unsupported_adapter_folder_is_refused(base, tmp_path, changes, text):
  path = adapter(tmp_path / 'adapter', base, **changes)
  with pytest.raises(InputError, match=text) as error:
    prepare.prepare_all(sft(base, lora=dict(rank=0, path=path)))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'fields, text',
  [
    (dict(hidden_size=32), 'has shape .* of another model'),
    (dict(num_layers=1), 'layers.1.* is missing; the adapter is of another'),
    (dict(num_layers=3), 'layers.2.* have no place; the adapter is of another'),
  ],
)
def test_adapter_of_another_model_is_refused(base, tmp_path, fields, text):
  cfg = dataclasses.replace(hf.read_config(base), **fields)
  path = adapter(tmp_path / 'adapter', base, cfg)
  with pytest.raises(InputError, match=text):
    prepare.prepare_all(sft(base, lora=dict(path=path)))


def test_rank_other_than_that_of_the_adapter_is_refused(base, tmp_path):
  path = adapter(tmp_path / 'adapter', base)
  with pytest.raises(InputError, match='config.lora.rank: 7 is not the rank of the adapter .*, .; leave it 0'):
    prepare.prepare_all(sft(base, lora=dict(rank=7, path=path)))


def test_folder_without_a_readable_adapter_is_refused(base, tmp_path):
  with pytest.raises(InputError, match='it has no adapter_config.json'):
    prepare.prepare_all(sft(base, lora=dict(path=base)))
  path = adapter(tmp_path / 'adapter', base)
  (tmp_path / 'adapter/adapter_model.safetensors').write_bytes(b'short')
  with pytest.raises(InputError, match='adapter_model.safetensors: unreadable'):
    prepare.prepare_all(sft(base, lora=dict(path=path)))
