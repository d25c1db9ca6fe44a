"""PPO on GSM8K: the task of grpo_gsm8k.py, with a critic that estimates a value for each token.

python -m launch.train --config=configs/ppo_gsm8k.py --workdir=runs/ppo_gsm8k

Policy, critic and reference are three models of one size. With --config.critic.value_head=True --config.critic.lr=0
--config.critic.warmup_steps=0 the critic is a second head of the policy. Meant for one accelerator of 80 GB; time and
accuracy have not been measured yet. The metric is pass@1 of greedy answers to test questions (split `eval`); watch
critic/explained_variance, too. With `:model=qwen2_5_0_5b` verl reports 0.57 (docs/defaults.md). `:method=vapo` is PPO
for long reasoning: VAPO's lambdas, 50 steps for the critic alone, 16 answers to a prompt, no KL. `:model=NAME` takes a
name below, a hub id or a folder; data of your own: --config.data.path=FILE with question or prompt, and answer.
`:runlocal` (no network): a random model learns to begin with a digit; `reward` goes from 0.06 to 0.94 in 24 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

MODELS = {
  'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
  'qwen3_1_7b': 'Qwen/Qwen3-1.7B',
  'llama3_2_1b': 'meta-llama/Llama-3.2-1B-Instruct',
  'qwen2_5_0_5b': 'Qwen/Qwen2.5-0.5B-Instruct',
}
DATA = 'openai/gsm8k:main/{}-00000-of-00001.parquet'


def get_config(arg=None):
  arg = parse_arg(arg, method='ppo', model='qwen3_0_6b', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = arg.method
  config.model.path = MODELS.get(arg.model, arg.model)
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:gsm8k'
  config.reward = 'gsm8k'
  config.train.update(steps=200)
  config.optim.update(lr=1e-6, warmup_steps=10)
  config.critic.update(lr=1e-5, warmup_steps=5)
  config.rl.update(minibatches=4, kl_coef=0.001, lam=1.0)
  config.rollout.update(max_prompt_length=320, max_new_tokens=512, prompts=256, group_size=1)
  if arg.method == 'vapo':  # arXiv:2504.05118, section 5.1; its own lambdas
    config.critic.update(lr=2e-6, warmup_steps=50)
    config.rl.update(kl_coef=0.0, lam=0.95)
    config.rollout.update(prompts=16, group_size=16)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=50, samples=1, temperature=0.0)
  config.save.every = 50

  if arg.runlocal:
    made = 'generated:arithmetic:max=9,correct=1,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.reward = 'regex_match?pattern=^[0-9]'  # a random model is right now and then
    config.train.update(steps=24)
    config.optim.update(lr=2e-3, warmup_steps=4)
    config.critic.update(lr=2e-3, warmup_steps=0)
    config.rollout.update(max_prompt_length=48, max_new_tokens=8, prompts=32 // config.rollout.group_size)
    config.eval.update(every=0, size=4)
    config.save.every = 0
  return config
