"""docs/metrics.md names every metric that runs write, and none that no code knows."""

import pathlib
import re

import pytest
import rich.console
import tiny

import jaxpost
from jaxpost.monitor import metrics

CLONE = pathlib.Path(__file__).resolve().parents[1]
PLACES = {'NAME': '[^/]+', 'ROLE': '[^/]+', 'KEY': '.+', 'N': r'\d+', '@k': r'@\d+'}


def documented():
  """The keys in the first columns of the tables."""
  rows = re.findall(r'^\| (`.+?) \|', (CLONE / 'docs/metrics.md').read_text(), re.M)
  return [key for row in rows for key in re.findall('`(.+?)`', row)]


def pattern(key):
  for name, place in PLACES.items():
    key = re.sub(rf'(?<![A-Z]){name}(?![A-Za-z])', place.replace('\\', r'\\'), key)
  return re.compile(f'(critic/)?{key}')


RUNS = {
  'sft': dict(algorithm='sft', eval=dict(every=1, size=4, data=dict(path='DATA'))),
  'dpo': dict(algorithm='dpo', data=dict(path='generated:arithmetic_pairs:max=99,ops=+,size=20')),
  'grpo': dict(
    algorithm='grpo',
    reward='regex_match?pattern=[aeiou]',
    rl=dict(kl_coef=0.1, importance=('token_truncated',), dynamic_sampling=2, keep_surplus=1, minibatches=2),
    rollout=dict(prompts=4, group_size=4, max_prompt_length=32, max_new_tokens=8),
    eval=dict(every=1, size=4, samples=2, data=dict(path='DATA')),
  ),
  'ppo': dict(
    algorithm='ppo',
    reward='regex_match?pattern=[aeiou]',
    rollout=dict(prompts=4, group_size=1, max_prompt_length=32, max_new_tokens=8),
  ),
}


@pytest.mark.parametrize('name', RUNS)
def test_every_metric_has_a_meaning(tmp_path, name):
  data = 'generated:arithmetic:max=99,ops=+,size=20'
  over = tiny.merged(dict(data=dict(path=data), train=dict(steps=2), save=dict(export=False)), RUNS[name])
  if 'eval' in over:
    over['eval']['data']['path'] = data
  if over.get('reward'):
    over['train']['row_length'] = 0
  jaxpost.run(
    tiny.run_config(tiny.folder(tmp_path / 'model'), **over), tmp_path / 'run', rich.console.Console(quiet=True)
  )
  found = {key for row in metrics.read_rows(tmp_path / 'run/metrics.jsonl') for key in row} - {*metrics.ROW_KEYS}
  patterns = [pattern(key) for key in documented()]
  assert len(found) > 20
  assert not sorted(key for key in found if not any(p.fullmatch(key) for p in patterns))


def test_every_metric_has_a_healthy_range_and_what_to_do():
  rows = [line for line in (CLONE / 'docs/metrics.md').read_text().splitlines() if line.startswith('| `')]
  tables = [[cell.strip() for cell in re.split(r'(?<!\\)\|', row)[1:-1]] for row in rows]
  assert len(tables) > 90
  assert not [cells[0] for cells in tables if len(cells) != 4 or not all(cells)]


def test_every_meaning_has_a_metric():
  """The last part of each key is in the code, as a text or a part of one."""
  code = ''.join(path.read_text() for path in (CLONE / 'jaxpost').rglob('*.py'))
  keys = [re.sub('|'.join(PLACES), '', key).rstrip('/@').rpartition('/')[2] for key in documented()]
  assert len(keys) > 120
  assert not [key for key in keys if key and key not in code]
