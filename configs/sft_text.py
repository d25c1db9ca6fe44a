"""Plain text continuation: more pre-training of a model on your documents.

python -m launch.train --config=configs/sft_text.py --workdir=runs/sft_text \
  --config.data.path=TRAIN --config.eval.data.path=HELD_OUT

Meant for one accelerator of 80 GB; time and loss have not been measured yet. The metric is the loss
of held-out text, nats a token (split `eval`). No published figure is known for this recipe. TRAIN
is a .txt file (documents between <|endoftext|> or blank lines), or rows with `text` in any format;
the default is stories. `:model=` takes a hub id or a folder. `:runlocal` needs no network: a tiny random
model learns generated sums as text, and the held-out loss goes from 5.55 to 1.72 in 40 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

STORIES = 'roneneldan/TinyStories:TinyStoriesV2-GPT4-{}.txt'


def get_config(arg=None):
  arg = parse_arg(arg, model='Qwen/Qwen3-0.6B-Base', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'sft'
  config.model.path = arg.model
  config.data.path = STORIES.format('train')
  config.data.map = 'jaxpost.data.maps:text'
  config.train.update(steps=1000, batch_size=16, row_length=2048)
  config.optim.update(lr=2e-5, schedule='cosine', warmup_steps=50, b2=0.95, weight_decay=0.1)
  config.eval.data.path = STORIES.format('valid')
  config.eval.update(every=200, size=512)
  config.save.every = 200

  if arg.runlocal:
    made = 'generated:arithmetic:correct=1,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.train.update(steps=40, batch_size=4, row_length=256)
    config.optim.update(lr=3e-3, warmup_steps=4)
    config.eval.update(every=0, size=64)
    config.save.every = 0
  return config
