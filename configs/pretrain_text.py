"""Pre-training from scratch: a random model learns plain text.

python -m launch.train --config=configs/pretrain_text.py --workdir=runs/text \
  --config.data.path=TRAIN --config.eval.data.path=HELD_OUT

Meant for one accelerator of 80 GB; time and loss have not been measured yet. The metric is the loss
of held-out text, nats a token (split `eval`). No published figure is known for this recipe. TRAIN
is a .txt file (documents between <|endoftext|> or blank lines), or rows with `text` in any format;
the default is stories. `:preset=` names a shape of models/presets.toml, `:tokenizer=` a folder, a hub
id or 'bytes', with at most as many tokens as the shape.
`:runlocal` needs no network: a tiny random model learns generated sums as text, and the held-out loss goes from 5.56
to 1.05 in 40 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

STORIES = 'roneneldan/TinyStories:TinyStoriesV2-GPT4-{}.txt'


def get_config(arg=None):
  arg = parse_arg(arg, preset='qwen3_0_6b', tokenizer='Qwen/Qwen3-0.6B-Base', runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'sft'
  config.model.update(preset=arg.preset, tokenizer=arg.tokenizer, remat='full')
  config.data.path = STORIES.format('train')
  config.data.map = 'jaxpost.data.maps:text'
  config.train.update(steps=20_000, batch_size=64, row_length=2048)
  # For small models; larger ones take less.
  config.optim.update(lr=6e-4, end_lr=6e-5, schedule='cosine', warmup_steps=1000, b2=0.95, weight_decay=0.1)
  config.eval.data.path = STORIES.format('valid')
  config.eval.update(every=1000, size=512)
  config.save.every = 1000

  if arg.runlocal:
    made = 'generated:arithmetic:max=9,correct=1,split='
    config.model.update(preset='tiny', tokenizer='bytes', remat='none')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.train.update(steps=40, batch_size=4, micro_batch_size=2)
    config.train.row_length = 256
    config.optim.update(lr=3e-3, end_lr=3e-4, warmup_steps=4)
    config.eval.update(every=0, size=64)
    config.save.every = 0
  return config
