"""docs/metrics.md documents every metric that runs write, and none that the code does not have."""

import pathlib
import re

import pytest
import rich.console
import tiny

import jaxpost
from jaxpost.monitor import metrics

CLONE = pathlib.Path(__file__).resolve().parents[1]
PLACEHOLDERS = {'NAME': '[^/]+', 'ROLE': '[^/]+', 'KEY': '.+', 'N': r'\d+', '@k': r'@\d+'}


def documented():
  """Returns the keys in the first columns of the tables."""
  rows = re.findall(r'^\| (`.+?) \|', (CLONE / 'docs/metrics.md').read_text(), re.M)
  return [key for row in rows for key in re.findall('`(.+?)`', row)]


def pattern(key):
  """Returns the regular expression of a documented key, in which `PLACEHOLDERS` stand for names and numbers."""
  for name, regex in PLACEHOLDERS.items():
    key = re.sub(rf'(?<![A-Z]){name}(?![A-Za-z])', regex.replace('\\', r'\\'), key)
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
  overrides = tiny.merged(dict(data=dict(path=data), train=dict(steps=2), save=dict(export=False)), RUNS[name])
  if 'eval' in overrides:
    overrides['eval']['data']['path'] = data
  if overrides.get('reward'):
    overrides['train']['row_length'] = 0
  jaxpost.run(
    tiny.run_config(tiny.folder(tmp_path / 'model'), **overrides), tmp_path / 'run', rich.console.Console(quiet=True)
  )
  written = {key for row in metrics.read_rows(tmp_path / 'run/metrics.jsonl') for key in row} - {*metrics.ROW_KEYS}
  patterns = [pattern(key) for key in documented()]
  assert len(written) > 20
  assert not sorted(key for key in written if not any(p.fullmatch(key) for p in patterns))


def test_every_documented_metric_has_range_and_advice():
  rows = [line for line in (CLONE / 'docs/metrics.md').read_text().splitlines() if line.startswith('| `')]
  tables = [[cell.strip() for cell in re.split(r'(?<!\\)\|', row)[1:-1]] for row in rows]
  assert len(tables) > 90
  assert not [cells[0] for cells in tables if len(cells) != 4 or not all(cells)]


def test_every_meaning_has_a_metric():
  """The last part of each documented key occurs in the code."""
  code = ''.join(path.read_text() for path in (CLONE / 'jaxpost').rglob('*.py'))
  keys = [re.sub('|'.join(PLACEHOLDERS), '', key).rstrip('/@').rpartition('/')[2] for key in documented()]
  assert len(keys) > 120
  assert not [key for key in keys if key and key not in code]
