"""DPO and its family on the preferences for helpful answers of HH-RLHF.

python -m launch.train --config=configs/dpo_hh.py --workdir=runs/dpo_hh

Meant for one accelerator of 80 GB; time and accuracy have not been measured yet. The
metric is rewards/accuracies on held-out pairs (split `eval`). Figures of similar runs: docs/defaults.md.
`:method=NAME` is dpo, ld_dpo, wpo, orpo, cpo or simpo; `:loss=NAME` selects another pair
loss (ipo, hinge, robust, ...: docs/methods/dpo.md). `:model=NAME` takes a name
below, a hub id or a folder; data of your own: --config.data.path=FILE with
prompt, chosen and rejected. --config.preference.precompute_ref=True caches the
reference log-probs on disk, so that no second model is in memory.
`:runlocal` needs no network: a tiny random model learns generated pairs. On those it trains on,
`rewards/margins` goes from 0.00 to 0.55 in 40 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

MODELS = {
  'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
  'qwen3_1_7b': 'Qwen/Qwen3-1.7B',
  'llama3_2_1b': 'meta-llama/Llama-3.2-1B-Instruct',
}
DATA = 'Anthropic/hh-rlhf:helpful-base/{}.jsonl.gz'


def get_config(arg=None):
  arg = parse_arg(arg, model='qwen3_0_6b', method='dpo', loss='', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = arg.method
  config.model.path = MODELS.get(arg.model, arg.model)
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:hh_rlhf'
  config.preference.losses = (arg.loss,) if arg.loss else ()
  config.train.update(steps=600, batch_size=32, row_length=2048)
  config.optim.update(lr=1e-6, schedule='linear', warmup_steps=60)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=100, size=1024)
  config.save.every = 100

  if arg.runlocal:
    made = 'generated:arithmetic_pairs:max=9,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.train.update(steps=40, batch_size=4, row_length=256)
    config.optim.update(lr=1e-3, warmup_steps=4)
    config.eval.update(every=0, size=4)
    config.save.every = 0
  return config
