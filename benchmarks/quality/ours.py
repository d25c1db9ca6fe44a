"""Trains with jaxpost: `python -m benchmarks.quality.ours FOLDER prepare|sft|sft_longer|dpo|grpo [SEED]`.

`prepare` writes into FOLDER a model with random weights, `random`, as a Hugging Face folder, and the data as
jsonl, for each seed in an order of its own that all libraries keep. settings.json names the model from which each
method starts. A method writes FOLDER/jaxpost/METHOD/SEED: `export`, the trained model as such a folder, and
`log.jsonl`, a line for each step; the rivals beside it read and write the same.
"""

import json
import pathlib
import random
import shutil
import sys
from typing import Any

import ml_collections
import rich.console

import jaxpost
from jaxpost.data import generated

SETTINGS = json.loads(pathlib.Path(__file__).with_name('settings.json').read_text())
KINDS = {'sft': 'arithmetic', 'sft_longer': 'arithmetic', 'grpo': 'arithmetic', 'dpo': 'arithmetic_pairs'}


def config(**blocks: Any) -> dict:
  """Returns the defaults with some blocks changed; no schedule, as the rivals have none."""
  made = ml_collections.ConfigDict(jaxpost.defaults())
  made.update(
    optim=dict(b2=SETTINGS['b2'], schedule='constant', warmup_steps=0, weight_decay=0.0),
    model=dict(dtype='float32'),
    log=dict(tensorboard=False, every=1),
  )
  made.update(blocks)
  return made.to_dict()


def train(folder: pathlib.Path, made: dict) -> None:
  """Trains, and keeps the export and the metrics alone."""
  jaxpost.run(made, folder / 'run', console=rich.console.Console(quiet=True))
  shutil.copytree(folder / 'run' / 'export', folder / 'export')
  shutil.copy(folder / 'run' / 'metrics.jsonl', folder / 'log.jsonl')
  shutil.rmtree(folder / 'run')


def prepare(folder: pathlib.Path) -> None:
  """Writes the starts and the data."""
  for name, kind in KINDS.items():
    made = {
      split: list(generated.rows(kind, f'{SETTINGS["sums"]},split={split},size={size},correct=1.0'))
      for split, size in (('train', SETTINGS['size']), ('test', SETTINGS['held_out']))
    }
    files = {'test': made['test']}
    for seed in range(SETTINGS['seeds']):
      files[str(seed)] = random.Random(seed).choices(made['train'], k=SETTINGS[name]['steps'] * SETTINGS[name]['batch'])
    for file, rows in files.items():
      (folder / f'{name}_{file}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  data = f'generated:arithmetic:{SETTINGS["sums"]},size=64'
  made = config(model=dict(preset='tiny'), data=dict(path=data), train=dict(steps=1, batch_size=1, row_length=256))
  made['optim'].update(lr=1e-12)
  train(folder / 'random', made)


def method(folder: pathlib.Path, name: str, seed: int) -> None:
  """Trains a method from its start."""
  given = SETTINGS[name]
  made = config(
    algorithm=name.removesuffix('_longer'),
    seed=seed,
    model=dict(path=str(folder / given['start'] / 'export'), dtype='float32'),
    data=dict(path=str(folder / f'{name}_{seed}.jsonl'), packing=False, shuffle=False),
  )
  made['optim'].update(lr=given['lr'])
  made['train'].update(steps=given['steps'])
  if name == 'grpo':
    made['reward'] = 'exact_match'
    made['rollout'].update(prompts=given['batch'], group_size=given['group'])
    made['rollout'].update(max_prompt_length=48, max_new_tokens=given['new'])
    made['rl'].update(kl_coef=0.0)
  else:
    pair = 2 if name == 'dpo' else 1  # one document, or the two of a pair, in a row of its own
    made['train'].update(batch_size=given['batch'], row_length=64 * pair)
  if name == 'dpo':
    made['preference'].update(beta=given['beta'])
  train(folder / 'jaxpost' / name / str(seed), made)


if __name__ == '__main__':
  where = pathlib.Path(sys.argv[1]).resolve()
  where.mkdir(parents=True, exist_ok=True)
  if sys.argv[2] == 'prepare':
    prepare(where)
  else:
    method(where, sys.argv[2], int(sys.argv[3]))
