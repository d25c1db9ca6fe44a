"""GRPO on GSM8K with a calculator: episodes of several turns, one tool.

python -m launch.train --config=configs/tools_gsm8k.py --workdir=runs/tools

Meant for one accelerator of 80 GB; time and accuracy have not been measured yet. Nothing is held
out: the metrics are `reward`, `tools/*` and `episodes/*` of training; --config.eval.data.path=FILE and
--config.eval.samples=1 add pass@1. No published figure is known for this recipe. An environment of your own:
--config.environment=./env.py:Class, as in docs/environments.md. `:model=NAME` takes a hub id or a folder.
`:runlocal` needs no network: a tiny random model is rewarded for an answer that begins with a digit, and calls no
tool. `reward` goes from 0.03 to 0.55 in 30 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

DATA = 'openai/gsm8k:main/{}-00000-of-00001.parquet'


def get_config(arg=None):
  arg = parse_arg(arg, model='Qwen/Qwen3-1.7B', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'grpo'
  config.model.path = arg.model
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:gsm8k'
  config.environment = 'jaxpost.environments.examples:Calculator'
  config.tools.max_turns = 6
  config.reward = 'gsm8k'  # of the last turn
  config.train.update(steps=200)
  config.optim.update(lr=1e-6, warmup_steps=10)
  config.rollout.update(max_new_tokens=1024, prompts=32, group_size=8)
  config.save.every = 50

  if arg.runlocal:
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = 'generated:arithmetic:max=9,correct=1,split=train'
    config.reward = 'regex_match?pattern=^[0-9]'  # a random model is right now and then
    config.train.update(steps=30)
    config.optim.update(lr=2e-3, warmup_steps=4)
    config.rollout.update(max_prompt_length=48, max_new_tokens=16, prompts=8)
    config.save.every = 0
  return config
