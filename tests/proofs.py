"""Checks that every model with layers of its own must pass: sampling, adapters, GRPO and resumed runs.

test_hybrid.py, test_mixed.py and others call these; test_families.py has the families of plain attention.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpost.formats import hf_export, peft
from jaxpost.models import model as model_lib
from jaxpost.models import quantization
from jaxpost.monitor import metrics
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import native
from jaxpost.types import Prompt


def engine(model, **fields) -> native.NativeEngine:
  """Returns a greedy engine of three slots; `fields` replace fields of `native.SamplerConfig`."""
  settings = dict(slots=3, max_prompt=9, max_new_tokens=64, stop_ids=(-2,), block=4, temperature=0.0)
  return native.NativeEngine(
    model, native.SamplerConfig(**settings | fields), tiny.one_device('rollout'), tiny.EXACT, Ledger()
  )


def check_slots(model, params, sampler) -> None:
  """Checks sampled log-probabilities against a forward pass of each whole text alone.

  The prompts have several lengths, are forked into two samples each, and are more than the slots.

  sampler: an `engine` for 24 new tokens, with the parameters loaded.
  """
  ids, lengths = tiny.tokens((3, 9)), (9, 2, 5)
  prompts = [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate(lengths)]
  rollout = sampler(prompts, group_size=2, step=0, run_key=np.zeros(2, np.uint32), sampling=dict(temperature=1.0))
  assert len({tuple(x) for x in rollout.completions}) == 6  # no two samples are equal
  texts = [np.r_[ids[i // 2, : lengths[i // 2]], rollout.completions[i]] for i in range(6)]
  padded = np.stack([np.pad(x, (0, 33 - len(x))) for x in texts])
  logp = jax.nn.log_softmax(tiny.logits(model, params, padded))
  for i, text in enumerate(texts):
    n = lengths[i // 2]
    text_logprobs = np.take_along_axis(np.asarray(logp[i, n - 1 : len(text) - 1]), text[n:, None], 1)[:, 0]
    np.testing.assert_allclose(text_logprobs, rollout.logprobs[i], atol=1e-5)


def check_greedy_text(config, folder) -> None:
  """Checks that 64 greedy tokens equal those of transformers; `config` has untied embeddings."""
  torch = pytest.importorskip('torch')
  from transformers import AutoModelForCausalLM

  model = model_lib.build(config)
  params = tiny.params(model)
  hf_export.save(folder, model, params)
  network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager').eval()
  sampler = engine(model)
  sampler.load(params, version=0)
  ids = tiny.tokens((2, 9), seed=3)
  prompts = [Prompt(i, ids[i, :n], '', {}) for i, n in enumerate((9, 4))]
  rollout = sampler(prompts, group_size=1, step=0, run_key=np.zeros(2, np.uint32))
  for i, n in enumerate((9, 4)):
    text = network.generate(torch.tensor(ids[i : i + 1, :n]).long(), max_new_tokens=64, do_sample=False)[0, n:]
    assert len(set(text.tolist())) > 4  # the text is no loop over a few tokens
    np.testing.assert_array_equal(rollout.completions[i], text.numpy())


def check_grpo(model_folder: str, workdir, targets: str) -> None:
  """Checks step one of GRPO with adapters on a shared base: log-probs of sampler and trainer agree, and KL is 0."""
  import jaxpost

  lora = dict(rank=2, targets=targets)
  jaxpost.run(tiny.grpo_config(model_folder, lora=lora, rl=dict(kl_coef=0.01), train=dict(steps=1)), workdir)
  first = metrics.read_rows(workdir / 'metrics.jsonl')[0]
  assert abs(first['sampler_mismatch'] - 1) < 1e-5 and first['kl'] < 1e-9
  assert first['grad_norm'] > 0


def check_adapters(config, quantized: str, folder) -> dict:
  """Checks that adapters compute what merged weights do and, on plain bases, that PEFT files restore them.

  config: with `lora`.
  quantized: format of the base, or ''.
  Returns the parameters.
  """
  model = model_lib.build(config)
  if quantized:
    model = quantization.quantize_model(model_lib.freeze(model, ''), quantized)
  params = model.init(jax.random.key(0))
  random = np.random.RandomState(0)
  for stack in params['lora'].values():
    for pair in stack.values():
      pair['b'] = jnp.asarray(0.2 * random.standard_normal(pair['b'].shape).astype('f'))
  ids = tiny.tokens((2, 12))
  positions = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)

  def run(m, p):
    return jax.jit(lambda p: m.forward(p, ids, positions, np.ones_like(ids), compute=tiny.EXACT))(p)

  adapted, merged = run(model, params), run(model.base, model.merge(params))
  assert tiny.largest(adapted - merged) <= 1e-5 * tiny.largest(merged)
  if not quantized:
    peft.writer(model, params, 'base')(folder)
    loaded = peft.load(folder, model, model_lib.trained_part(model).shardings(tiny.one_device()))
    jax.tree.map(np.testing.assert_array_equal, loaded['lora'], params['lora'])
  return params


def check_resume(model_folder: str, folder, **over) -> dict[str, np.ndarray]:
  """Checks that a run that is stopped halfway and resumed exports the same bits; returns the exported tensors."""
  import jaxpost

  config = tiny.run_config(model_folder, train=dict(steps=4), save=dict(every=2, export=True), **over)
  jaxpost.run(config, folder / 'whole')
  jaxpost.run(tiny.merged(config, dict(train=dict(steps=2))), folder / 'parts')
  jaxpost.run(config, folder / 'parts')
  uninterrupted, resumed = map(exported, (folder / 'whole', folder / 'parts'))
  jax.tree.map(np.testing.assert_array_equal, uninterrupted, resumed)
  return uninterrupted


def check_lost_steps(config: dict, folder) -> None:
  """Checks that a run of 4 steps that loses its last checkpoint has the same rows and weights when it ends again."""
  import jaxpost

  jaxpost.run(config, folder / 'whole')
  shutil.copytree(folder / 'whole', folder / 'again')
  (last,) = (folder / 'again/checkpoints').glob('*/4')
  shutil.rmtree(last)
  shutil.rmtree(folder / 'again/export')
  jaxpost.run(config, folder / 'again')

  def rows_and_weights(name):
    (weights,) = (folder / name / 'export').rglob('*.safetensors')
    return metrics.comparable_rows(folder / name / 'metrics.jsonl'), weights.read_bytes()

  whole, resumed = rows_and_weights('whole'), rows_and_weights('again')
  assert [row['step'] for row in whole[0] if row['split'] == 'train'] == [1, 2, 3, 4]
  assert whole == resumed


def exported(run) -> dict[str, np.ndarray]:
  """Returns the tensors that a run exported."""
  return tensors(run / 'export')


def tensors(folder) -> dict[str, np.ndarray]:
  """Returns the tensors of the safetensors files in a folder."""
  files = sorted(folder.glob('*.safetensors'))
  return {name: x for file in files for name, x in safetensors.numpy.load_file(file).items()}
