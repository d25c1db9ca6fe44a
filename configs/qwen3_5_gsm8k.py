"""SFT, then GRPO, on GSM8K with the text model of Qwen 3.5 (layers with the gated delta rule beside attention).

python -m launch.train --config=configs/qwen3_5_gsm8k.py --workdir=runs/qwen3_5

SFT learns the worked answers; GRPO, from the model after it, is rewarded for the right '#### 42'.
Meant for one accelerator of 80 GB; time and accuracy have not been measured yet. The metric is
pass@1 of the greedy answers to test questions (split `eval`). No published figure is known for this recipe;
for GRPO alone Tinker reports 0.96 with Qwen3.5-9B (docs/defaults.md).
`:model=NAME` is a hub id or a folder, with towers that are not trained (model.text_only); of a text
model in a folder of its own, too: --config.model.text_only=False.
`:runlocal` (no network): SFT of a tiny random model on sums; its held-out loss goes from 5.50 to 1.46 in 30 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

DATA = 'openai/gsm8k:main/{}-00000-of-00001.parquet'
MADE = 'generated:arithmetic:max=9,correct=1,split='


def get_config(arg=None):
  arg = parse_arg(arg, model='Qwen/Qwen3.5-0.8B', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.stages = ('sft', 'grpo')
  config.model.update(path=arg.model, text_only=True)
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:gsm8k'
  config.reward = 'gsm8k'
  config.rollout.update(max_prompt_length=320, max_new_tokens=512)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=50, samples=1, temperature=0.0)
  config.save.every = 50
  config.sft = dict(
    algorithm='sft',
    train=dict(steps=200, batch_size=16, row_length=1024),
    optim=dict(lr=2e-5, schedule='cosine', warmup_steps=20),
  )
  config.grpo = dict(
    algorithm='grpo',
    train=dict(steps=200),
    optim=dict(lr=1e-6, warmup_steps=10),
    rollout=dict(prompts=32, group_size=8),
  )

  if arg.runlocal:
    config.model.update(path='', text_only=False, preset='tiny_hybrid', tokenizer='bytes')
    config.data.path = MADE + 'train'
    config.eval.data.path = MADE + 'test'
    config.rollout.update(max_prompt_length=48, max_new_tokens=8)
    config.eval.update(every=0, size=16)
    config.save.every = 0
    config.sft.update(train=dict(steps=30, batch_size=4, row_length=128), optim=dict(lr=3e-3, warmup_steps=4))
    config.grpo.train.steps = 3
    config.grpo.rollout.update(prompts=2, group_size=4)
  return config
