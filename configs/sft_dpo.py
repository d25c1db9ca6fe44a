"""SFT, then DPO, in two stages of one run.

python -m launch.train --config=configs/sft_dpo.py --workdir=runs/sft_dpo

On UltraFeedback, as Zephyr (arXiv:2310.16944). DPO starts from the SFT
model, which is also its reference; the reference log-probs are cached on disk. Meant for one
accelerator of 80 GB; time and quality have not been measured yet. The metric is
rewards/accuracies of stage `dpo` on held-out pairs (split `eval`). No published figure is known for this recipe.
`:model=NAME` is a hub id or a folder.
`:runlocal` needs no network: a tiny random model learns generated sums, then pairs. On the pairs it trains on,
`rewards/margins` goes from 0.00 to 0.36 in 50 steps of DPO.
"""

import ml_collections

from jaxpost import defaults, parse_arg

DATA = 'HuggingFaceH4/ultrafeedback_binarized:data/{}-00000-of-00001.parquet'
MADE = 'generated:arithmetic{}:max=9,split={}'


def get_config(arg=None):
  arg = parse_arg(arg, model='Qwen/Qwen3-0.6B-Base', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.stages = ('sft', 'dpo')
  config.model.path = arg.model
  config.train.update(batch_size=32, row_length=2048)
  config.optim.update(schedule='cosine', warmup_steps=20)
  config.eval.update(every=100, size=1024)
  config.save.every = 100
  config.sft = dict(
    algorithm='sft',
    optim=dict(lr=2e-5),
    train=dict(steps=1000),
    data=dict(path=DATA.format('train_sft')),
    eval=dict(data=dict(path=DATA.format('test_sft'))),
  )
  config.dpo = dict(
    algorithm='dpo',
    optim=dict(lr=5e-7),
    train=dict(steps=1000),
    preference=dict(precompute_ref=True),
    data=dict(path=DATA.format('train_prefs'), map='jaxpost.data.maps:ultrafeedback'),
    eval=dict(data=dict(path=DATA.format('test_prefs'))),
  )

  if arg.runlocal:
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.train.update(batch_size=4, row_length=256)
    config.optim.warmup_steps = 4
    config.eval.update(every=0, size=4)
    config.save.every = 0
    config.dpo.data.map = ''
    for stage, kind, steps, lr in ('sft', '', 20, 3e-3), ('dpo', '_pairs', 50, 1e-3):
      config[stage].update(train=dict(steps=steps), optim=dict(lr=lr))
      config[stage].data.path = MADE.format(kind, 'train')
      config[stage].eval.data.path = MADE.format(kind, 'test')
  return config
