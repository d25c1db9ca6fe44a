"""Online DPO on GSM8K: the best and the worst of the policy's 8 answers are a pair.

python -m launch.train --config=configs/online_dpo_gsm8k.py --workdir=runs/odpo

Each step samples 8 answers to each of 64 questions; a question whose answers are all right or all
wrong has no pair (`groups_without_pair`). Meant for one accelerator of 80 GB; time and accuracy
have not been measured yet. The metric is pass@1 of the greedy answers to test questions (split
`eval`). No published figure is known for this recipe. `:model=NAME` takes a name below, a hub id or
a folder; data of your own: --config.data.path=FILE with question and answer, or prompt and answer.
`:runlocal` needs no network: a tiny random model is rewarded for an answer that begins with a digit. `reward` goes
from 0.03 to 0.53 in 30 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

MODELS = {
  'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
  'qwen3_1_7b': 'Qwen/Qwen3-1.7B',
  'llama3_2_1b': 'meta-llama/Llama-3.2-1B-Instruct',
}
DATA = 'openai/gsm8k:main/{}-00000-of-00001.parquet'


def get_config(arg=None):
  arg = parse_arg(arg, model='qwen3_0_6b', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'online_dpo'
  config.model.path = MODELS.get(arg.model, arg.model)
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:gsm8k'
  config.reward = 'gsm8k'
  config.train.update(steps=200)
  config.optim.update(lr=1e-6, warmup_steps=10)
  config.rollout.update(max_prompt_length=320, max_new_tokens=512, prompts=64, group_size=8)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=50, samples=1, temperature=0.0)
  config.save.every = 50

  if arg.runlocal:
    made = 'generated:arithmetic:max=9,correct=1,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.reward = 'regex_match?pattern=^[0-9]'  # a random model is right now and then
    config.train.update(steps=30)
    config.optim.update(lr=2e-3, warmup_steps=4)
    config.rollout.update(max_prompt_length=48, max_new_tokens=8, prompts=8)
    config.eval.update(every=0, size=4)
    config.save.every = 0
  return config
