"""GKD on GSM8K: a small model learns a larger model's distribution on its own samples.

python -m launch.train --config=configs/gkd_gsm8k.py --workdir=runs/gkd_gsm8k

Meant for one accelerator of 80 GB; time and accuracy have not been measured yet. Half
of the steps train on samples, half on the worked answers. The metric is pass@1
of the greedy answers to test questions (split `eval`); the reward is only
logged. No published figure is known for this recipe. `:model=NAME` and `:teacher=NAME` take a name below, a hub id or a
folder. To use custom data, set --config.data.path=FILE with question and answer,
or prompt and completion.
`:runlocal` needs no network: the student is a tiny random model, the teacher the same one after 30 steps of SFT on
generated sums. On its samples and on worked sums, `divergence` goes from 0.43 to 0.08 in 30 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

MODELS = {'qwen3_0_6b': 'Qwen/Qwen3-0.6B', 'qwen3_1_7b': 'Qwen/Qwen3-1.7B', 'qwen3_4b': 'Qwen/Qwen3-4B'}
DATA = 'openai/gsm8k:main/{}-00000-of-00001.parquet'


def get_config(arg=None):
  arg = parse_arg(arg, model='qwen3_0_6b', teacher='qwen3_1_7b', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'gkd'
  config.model.path = MODELS.get(arg.model, arg.model)
  config.distill.teachers = (MODELS.get(arg.teacher, arg.teacher),)
  config.distill.on_policy = 0.5
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:gsm8k'
  config.reward = 'gsm8k'
  config.train.update(steps=200)
  config.optim.update(lr=1e-5, warmup_steps=10)
  config.rollout.update(max_prompt_length=320, max_new_tokens=512, prompts=64, group_size=1)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=50, samples=1, temperature=0.0)
  config.save.every = 50

  if arg.runlocal:
    made = 'generated:arithmetic:max=9,correct=1,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.train.update(steps=30, batch_size=4)
    config.optim.update(lr=2e-3, warmup_steps=4)
    config.rollout.update(max_prompt_length=48, max_new_tokens=8, prompts=32)
    config.eval.update(every=0, size=4)
    config.save.every = 0
    config.stages = ('begin', 'teach', 'learn')
    config.begin = dict(algorithm='sft', train=dict(steps=1), optim=dict(lr=0.0))  # the random model
    config.teach = dict(algorithm='sft', train=dict(row_length=256))
    config.learn = dict(init_from='stage:begin', distill=dict(teachers=('stage:teach',)))
  return config
