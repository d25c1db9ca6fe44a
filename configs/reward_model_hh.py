"""A reward model of the preferences for helpful answers of HH-RLHF.

python -m launch.train --config=configs/reward_model_hh.py --workdir=runs/rm_hh

The result, runs/rm_hh/export, loads as AutoModelForSequenceClassification and grades RL as
--config.reward=reward_model --config.reward_model.path=runs/rm_hh/export. Meant for one accelerator
of 80 GB; time and accuracy have not been measured yet. The metric is rewards/accuracies on held-out
pairs (split `eval`). No published figure is known for this recipe. `:model=NAME` takes a name
below, a hub id or a folder; data of your own: --config.data.path=FILE with prompt, chosen, rejected
and, if you like, margin.
`:runlocal` needs no network: a tiny random model learns generated pairs. On those it trains on, the loss goes from
0.69 to 0.24 in 60 steps.
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
  arg = parse_arg(arg, model='qwen3_0_6b', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'reward_model'
  config.model.path = MODELS.get(arg.model, arg.model)
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:hh_rlhf'
  config.reward_model.center_coef = 0.01
  config.train.update(steps=600, batch_size=32, row_length=2048)
  config.optim.update(lr=1e-5, schedule='cosine', warmup_steps=30)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=100, size=1024)
  config.save.every = 100

  if arg.runlocal:
    made = 'generated:arithmetic_pairs:max=9,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.update(path=made + 'train', map='')
    config.eval.data.path = made + 'test'
    config.train.update(steps=60, batch_size=4, row_length=256)
    config.optim.update(lr=1e-3, warmup_steps=4)
    config.eval.update(every=0, size=4)
    config.save.every = 0
  return config
