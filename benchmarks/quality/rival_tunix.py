"""Trains with Tunix, in an environment that has google-tunix.

python rival_tunix.py FOLDER sft|dpo|grpo SEED     writes FOLDER/tunix/METHOD/SEED
python rival_tunix.py FOLDER grpo SEED same_end    writes FOLDER/tunix_same_end/grpo/SEED

A folder has `export`, the trained model as a Hugging Face folder, and `log.jsonl`, a line for each step. Tunix takes
token ids for SFT and DPO, so these are the tokens that jaxpost trains on. The completions of its native sampler lack
the token that ended them; `same_end` leaves it in, as jaxpost and TRL train on it. `grpo_default` is GRPO with the
mean over tokens that Tunix takes by default.
"""

import json
import pathlib
import re
import shutil
import sys

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import numpy as safetensors
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.sft import peft_trainer
from tunix.sft.dpo import dpo_trainer

SETTINGS = json.loads(pathlib.Path(__file__).with_name('settings.json').read_text())
LENGTH = 64
ROOM = 40  # of the prompt, in DPO


def rows(folder, name):
  return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text().splitlines()]


def mesh():
  return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))


def config(start):
  read = json.loads((start / 'config.json').read_text())
  return qwen3.ModelConfig(
    num_layers=read['num_hidden_layers'],
    vocab_size=len(safetensors.load_file(start / 'model.safetensors')['model.embed_tokens.weight']),
    embed_dim=read['hidden_size'],
    hidden_dim=read['intermediate_size'],
    num_heads=read['num_attention_heads'],
    num_kv_heads=read['num_key_value_heads'],
    head_dim=read['head_dim'],
    rope_theta=read.get('rope_theta') or read['rope_parameters']['rope_theta'],
    norm_eps=read['rms_norm_eps'],
    use_tied_embedding=read['tie_word_embeddings'],
  )


def load(start):
  return qwen3_params.create_model_from_safe_tensors(str(start), config(start), mesh(), jnp.float32)


def save(model, start, folder):
  """Writes the weights under the names and in the shapes of `start`, by the table with which Tunix reads them."""
  flat = flax.traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  weights = {'.'.join(map(str, path)): np.asarray(x) for path, x in flat.items()}
  table = qwen3_params._get_key_and_transform_mapping(config(start))
  out = {}
  for name, old in safetensors.load_file(start / 'model.safetensors').items():
    for pattern, (ours, transform) in table.items():
      if re.fullmatch(pattern, name):
        x = weights[re.sub(pattern, ours, name)]
        transposed = bool(transform and transform[0])
        out[name] = np.ascontiguousarray(x.reshape(old.shape[::-1]).T if transposed else x.reshape(old.shape))
  assert len(out) == len(safetensors.load_file(start / 'model.safetensors'))
  shutil.copytree(start, folder, ignore=shutil.ignore_patterns('*.safetensors', '*.sha*', '*checksum*'))
  safetensors.save_file(out, folder / 'model.safetensors', {'format': 'pt'})


def optimizer(given):
  adamw = optax.adamw(given['lr'], b2=SETTINGS['b2'], weight_decay=0.0)
  return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def encoded(tokenizer, prompt, completion):
  head = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
  first = tokenizer(head, add_special_tokens=False)['input_ids']
  rest = tokenizer(completion[0]['content'] + tokenizer.eos_token, add_special_tokens=False)['input_ids']
  return first, rest


def padded(lists, length, left=False):
  """(ids, mask), both [B, length]."""
  ids, mask = np.zeros((len(lists), length), np.int32), np.zeros((len(lists), length), np.int32)
  for row, some in enumerate(lists):
    where = slice(length - len(some), length) if left else slice(0, len(some))
    ids[row, where], mask[row, where] = some, 1
  return ids, mask


def batches(found, size):
  return [found[i : i + size] for i in range(0, len(found), size)]


def sft(folder, seed, given, model, start):
  tokenizer = AutoTokenizer.from_pretrained(start)
  data = []
  for some in batches(rows(folder, f'sft_{seed}'), given['batch']):
    pairs = [encoded(tokenizer, r['prompt'], r['completion']) for r in some]
    ids, real = padded([a + b for a, b in pairs], LENGTH)
    _, trained = padded([[1] * len(a + b) for a, b in pairs], LENGTH)
    for row, (a, _) in enumerate(pairs):
      trained[row, : len(a)] = 0
    data.append(peft_trainer.TrainingInput(input_tokens=ids, input_mask=np.stack([trained, real])))
  made = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=given['steps'])
  trainer = peft_trainer.PeftTrainer(model, optimizer(given), made)

  def inputs(x):
    trained, real = x.input_mask
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None] & (real[:, None] > 0)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), real.shape)
    return dict(input_tokens=x.input_tokens, input_mask=trained, positions=positions, attention_mask=causal)

  return trainer.with_gen_model_input_fn(inputs), data


def dpo(folder, seed, given, model, start):
  tokenizer = AutoTokenizer.from_pretrained(start)
  data = []
  for some in batches(rows(folder, f'dpo_{seed}'), given['batch']):
    sides = [[encoded(tokenizer, r['prompt'], r[side]) for r in some] for side in ('chosen', 'rejected')]
    prompt = padded([a for a, _ in sides[0]], ROOM, left=True)
    answers = [x for side in sides for x in padded([b for _, b in side], LENGTH - ROOM)]
    data.append(dpo_trainer.TrainingInput(*prompt, *answers))
  made = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=10**9, max_steps=given['steps'], beta=given['beta'])
  return dpo_trainer.DPOTrainer(model, load(start), optimizer(given), made), data


def grpo(folder, seed, given, model, start, default=False):
  """Trains at once; the learner returns nothing to log."""
  from tunix.rl import rl_cluster as clusters
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  tokenizer, log = AutoTokenizer.from_pretrained(start), []
  roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
  cluster = clusters.RLCluster(
    actor=model,
    reference=load(start),
    tokenizer=tokenizer,
    cluster_config=clusters.ClusterConfig(
      role_to_mesh=dict.fromkeys(roles, mesh()),
      rollout_engine='vanilla',
      training_config=clusters.RLTrainingConfig(
        actor_optimizer=optimizer(given),
        eval_every_n_steps=10**9,
        max_steps=given['steps'],
        mini_batch_size=given['batch'],
        train_micro_batch_size=given['batch'],
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=given['new'],
        max_prompt_length=48,
        kv_cache_size=48 + given['new'],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[tokenizer.eos_token_id],
        seed=seed,
      ),
    ),
  )

  def right(prompts, completions, answer, **_):
    texts = [c.replace(tokenizer.eos_token, '').strip() for c in completions]
    log.append({'reward': float(np.mean([t == a for t, a in zip(texts, answer)]))})
    return [float(t == a) for t, a in zip(texts, answer)]

  mean = {} if default else {'loss_agg_mode': 'token-mean'}
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=[right],
    algo_config=grpo_learner.GRPOConfig(
      num_generations=given['group'], num_iterations=1, beta=0.0, epsilon=0.2, **mean
    ),
  )
  data = []
  for some in batches(rows(folder, f'grpo_{seed}'), given['batch']):
    heads = [tokenizer.apply_chat_template(r['prompt'], add_generation_prompt=True, tokenize=False) for r in some]
    data.append(dict(prompts=np.array(heads), answer=np.array([r['answer'] for r in some])))
  learner.train(data)
  return cluster.actor_trainer.model, log


def keep_ends():
  """Leaves the token that ended a completion in it; the native sampler returns what stands before it."""
  from tunix.generate import utils

  before = utils.np_find_first_eos_idx
  utils.np_find_first_eos_idx = lambda ids, eos_id: min(before(ids, eos_id) + 1, len(ids))


class Log(peft_trainer.hooks.TrainingHooks):
  """Keeps the loss of each step."""

  def __init__(self):
    self.rows = []

  def on_train_step_end(self, train_ctx, step, train_loss):
    self.rows.append({'step': step, 'loss': float(np.asarray(train_loss))})

  def on_train_start(self, train_ctx):
    pass

  on_train_end = on_train_step_start = on_eval_step_start = on_train_start

  def on_eval_step_end(self, train_ctx, eval_loss):
    pass


def train(folder, name, seed, library='tunix'):
  method = name.removesuffix('_default')
  given = SETTINGS[method]
  start, out = folder / given['start'] / 'export', folder / library / name / str(seed)
  model = load(start)
  with mesh():
    if method == 'grpo':
      model, log = grpo(folder, seed, given, model, start, default=name != method)
    else:
      trainer, data = {'sft': sft, 'dpo': dpo}[method](folder, seed, given, model, start)
      hooks = Log()
      trainer.with_training_hooks(hooks)
      trainer.train(data)
      model, log = trainer.model, hooks.rows
  out.mkdir(parents=True)
  save(model, start, out / 'export')
  (out / 'log.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in log))


if __name__ == '__main__':
  _, where, method_name, number, *end = sys.argv
  if end:
    keep_ends()
  train(pathlib.Path(where).resolve(), method_name, int(number), '_'.join(['tunix', *end]))
