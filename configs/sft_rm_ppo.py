"""SFT, a reward model from it, PPO against that: RLHF as in InstructGPT.

python -m launch.train --config=configs/sft_rm_ppo.py --workdir=runs/sft_rm_ppo

Three stages of one run (arXiv:2203.02155) on UltraFeedback: `sft` trains
on the chosen answers, `judge` trains a reward model from those weights on the pairs,
and `ppo` trains the SFT model against that reward model. Meant for one accelerator of 80 GB; time
and accuracy: not measured yet. Figures of similar runs: docs/defaults.md. The metrics are
rewards/accuracies of `judge` and rewards/reward_model/mean of `ppo`, both on held-out prompts.
`:model=NAME` is a hub id or a folder.
`:runlocal` needs no network: a tiny random model takes all stages on sums. In stage `ppo`, `reward` goes from 0.58 to
1.09 in 16 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

DATA = 'HuggingFaceH4/ultrafeedback_binarized:data/{}-00000-of-00001.parquet'
MADE = 'generated:arithmetic{}:max=9,split={}'


def get_config(arg=None):
  arg = parse_arg(arg, model='Qwen/Qwen3-0.6B', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.stages = ('sft', 'judge', 'ppo')
  config.model.path = arg.model
  config.data.path = DATA.format('train_prefs')
  config.data.map = 'jaxpost.data.maps:ultrafeedback'
  config.train.update(batch_size=32, row_length=2048)
  config.optim.update(schedule='cosine', warmup_steps=20)
  config.rollout.update(max_prompt_length=768, max_new_tokens=512, prompts=128, group_size=1)
  config.eval.data.path = DATA.format('test_prefs')
  config.eval.every = config.save.every = 100
  config.sft = dict(algorithm='sft', train=dict(steps=400), data=dict(map=''))
  config.sft.eval = dict(data=dict(path=DATA.format('test_sft')))
  config.judge = dict(algorithm='reward_model', train=dict(steps=600))
  config.ppo = dict(
    algorithm='ppo',
    init_from='stage:sft',
    reward='reward_model',
    reward_model=dict(path='stage:judge'),
    train=dict(steps=200, row_length=0),
    critic=dict(path='stage:judge'),
    rl=dict(minibatches=4, kl_coef=0.02),
    eval=dict(samples=1),
  )
  if arg.runlocal:
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.update(path=MADE.format('', 'train'), map='')
    config.train.update(batch_size=4, row_length=256)
    config.optim.update(lr=2e-3, warmup_steps=2)
    config.rollout.update(max_prompt_length=48, max_new_tokens=8, prompts=16)
    config.eval.update(every=0, size=4)
    config.eval.data.path = config.sft.eval.data.path = MADE.format('', 'test')
    config.judge.data = dict(path=MADE.format('_pairs', 'train'))
    config.judge.eval = dict(data=dict(path=MADE.format('_pairs', 'test')))
    for stage, steps in ('sft', 20), ('judge', 20), ('ppo', 16):
      config[stage].train.steps = steps
  return config
