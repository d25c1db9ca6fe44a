"""KTO: an instruct model learns from answers labeled good or bad.

python -m launch.train --config=configs/kto.py --workdir=runs/kto

Meant for one accelerator of 80 GB; time and accuracy have not been measured yet. The metrics are
rewards/margins and rewards/accuracies on held-out answers (split `eval`). No published figure is
known for this recipe. `:loss=apo_zero_unpaired` leaves the KL of mismatched answers out.
`:model=NAME` takes a name below, a hub id or a folder; data of your own: --config.data.path=FILE
with prompt, completion and label (true or false).
`:runlocal` needs no network: a tiny random model learns generated sums, right and wrong. On those it trains on,
`rewards/margins` goes from 0.00 to 0.52 in 40 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

MODELS = {
  'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
  'qwen3_1_7b': 'Qwen/Qwen3-1.7B',
  'llama3_2_1b': 'meta-llama/Llama-3.2-1B-Instruct',
}
DATA = 'trl-lib/kto-mix-14k:data/{}-00000-of-00001.parquet'


def get_config(arg=None):
  arg = parse_arg(arg, model='qwen3_0_6b', loss='kto', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'kto'
  config.model.path = MODELS.get(arg.model, arg.model)
  config.data.path = DATA.format('train')
  config.preference.losses = (arg.loss,)
  config.train.update(steps=400, batch_size=32, row_length=2048)
  config.optim.update(lr=1e-6, schedule='linear', warmup_steps=40)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=100, size=1024)
  config.save.every = 100

  if arg.runlocal:
    made = 'generated:arithmetic_labels:max=9,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.train.update(steps=40, batch_size=4, row_length=256)
    config.optim.update(lr=1e-3, warmup_steps=4)
    config.eval.update(every=0, size=4)
    config.save.every = 0
  return config
