"""SFT, then GRPO in an environment: a tiny model learns to play a game.

python -m launch.train --config=configs/text_game.py --workdir=runs/text_game

Two CPU cores, no download; it took about two and a half minutes, and takes
several times longer on cores that are slow or busy. Fine-tuned on games with
random moves, the model calls the tool `move` and finds the treasure about every
other time. GRPO plays the game itself:
`rewards/environment/mean` goes from 0.51 to 0.66 (docs/environments.md).
`:runlocal` is a few steps of it.
"""

import ml_collections

from jaxpost import defaults, parse_arg


def get_config(arg=None):
  arg = parse_arg(arg, runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.stages = ('sft', 'grpo')

  games = 'jaxpost.environments.examples:treasure'
  config.model.preset = 'tiny'
  config.environment = 'jaxpost.environments.examples:Treasure'
  config.tools.update(max_turns=2, workers=8)
  config.rollout.update(max_prompt_length=80, max_new_tokens=192)
  config.optim.b2 = 0.98
  config.data.path = 'generated:arithmetic:max=99,ops=+,size=4000,correct=1'

  config.sft = dict(
    algorithm='sft',
    data=dict(map=f'{games}_played'),
    train=dict(steps=240, row_length=256),
    optim=dict(lr=3e-3, schedule='cosine', warmup_steps=10),
  )
  config.grpo = dict(
    algorithm='grpo',
    data=dict(map=games),
    train=dict(steps=50),
    optim=dict(lr=2e-4, warmup_steps=3),
    rollout=dict(slots=16),
  )
  if arg.runlocal:
    config.sft.train.steps = 5
    config.grpo.train.steps = 2
    config.grpo.rollout = dict(prompts=2, group_size=4, slots=4)
  return config
