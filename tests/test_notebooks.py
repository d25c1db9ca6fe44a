"""Notebooks: each runs, shortened, in a kernel of its own, is stored without outputs, and matches the docs' outputs.

They run in an empty working directory, with the checkout on PYTHONPATH.
"""

import json
import os
import pathlib
import re

import pytest

nbclient = pytest.importorskip('nbclient')
nbformat = pytest.importorskip('nbformat')

CLONE = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((CLONE / 'notebooks').glob('*.ipynb'))
# Patterns that the outputs of a notebook must contain, in this order
OUTPUTS = {
  '01_sft_then_grpo': (
    r'Device',
    r'\d\+\d+=<\|im_end\|>',
    r'sft: .* parameters',
    r'sft 0 eval  loss 5\.',
    r'sft 20/20',
    r'\[1\.0, 0\.1, 0\.0\]',
    r'cannot be killed',
    r'grpo 4/4  .*reward',
    r'"components": \{"right_sum"',
    r'completions \(64, 8\)',
    r'largest difference (0\.0e\+00|\d\.\de-0[3-9])',
    r'2: reward 0\.\d+, kl 0\.0',
    r'model\.safetensors',
    r'<\|im_start\|>user\n17\+25=',
    r'88\+77= \S',
  ),
  '02_your_algorithm': (
    r'sft 20/20',
    r"'advantages': array\(\[\[ 0\.5,  0\.5\]",
    r'reinforce: .* parameters',
    r'reinforce 4/4  .*reward',
    r'reinforce: held-out pass@1 0\.\d\d before, 0\.\d\d after',
    r'with_critic: .* parameters, compiled \d+ programs',
    r'with_critic 4/4  .*reward',
    r'with_critic: held-out pass@1 0\.\d\d before, 0\.\d\d after',
  ),
  '03_every_method': (
    r'sft 20/20',
    r'start: 0\.\d\d',
    *(
      rf'{name}: pass@1 0\.\d\d -> 0\.\d\d'
      for name in (
        'dpo, from pairs',
        'kto, from labels',
        'grpo, from a verifier',
        'ppo, from a verifier',
        'distill, from a teacher',
      )
    ),
    r'reward_model, from pairs: accuracy 0\.00 -> 0\.[1-9]',
    r'before',
    *(rf'{name} +│ .* │ 0\.\d\d' for name in ('dpo', 'kto', 'grpo', 'ppo', 'distill', 'reward_model')),
  ),
  '04_your_model': (
    r'head/kernel +\(64, 259\) +\(.embed., .vocab.\)',
    r'[\d,]+ parameters',
    r'packed and alone differ by (?:\de-0[5-9]|0e\+00)',
    r'sft: .* parameters',
    r'recurrent: loss [5-7]\.\d+ -> [0-2]\.\d+, held-out',
    r'sampler off by (?:\de-0[2-9]|0e\+00)',
    r'attending: loss [5-7]\.\d+ -> [0-2]\.\d+, held-out',
    r"'model\.safetensors'",
    r'tensors, such as',
    r'first loss [5-7]\.\d+ at random, [0-2]\.\d+ from the export',
  ),
  '05_lora_your_reward': (
    r'cpu',
    r'"prompt": .*"answer"',
    r'\[1\.0, 0\.3, 0\.0\]',
    r'grpo: .* parameters',
    r'grpo 3/3  .*reward',
    r'step \d+: .* gets 0\.0',
    r'report\.html',
    r"'model\.safetensors'",
  ),
}
# Number of figures in the outputs
FIGURES = {
  '01_sft_then_grpo': 2,
  '02_your_algorithm': 3,
  '03_every_method': 1,
  '04_your_model': 1,
  '05_lora_your_reward': 1,
}
# Notebooks with a preview of training data, in which trained tokens are green
GREEN = ('01_sft_then_grpo',)
# Files that a run of the notebook must write, in a folder of runs/
FILES_MADE = {
  '01_sft_then_grpo': (
    'sft/summary.json',
    'grpo/summary.json',
    'grpo/report.html',
    'grpo/export/model.safetensors',
    'by_hand/tokenizer.json',
  ),
  '02_your_algorithm': ('reinforce/summary.json', 'with_critic/checkpoints/with_critic/4'),
  '03_every_method': tuple(
    f'{name}/summary.json' for name in ('sft', 'dpo', 'kto', 'grpo', 'distill', 'reward_model', 'ppo')
  ),
  '05_lora_your_reward': ('lora/summary.json', 'lora/report.html', 'merged/model.safetensors'),
  '04_your_model': tuple(f'{name}/export/model.safetensors' for name in ('recurrent', 'attending')),
}


def read(path):
  book = nbformat.read(path, 4)
  nbformat.validate(book)
  return book


def text_of(output):
  if output.output_type == 'stream':
    return output.text
  return output.get('data', {}).get('text/plain', '')


def name(path):
  return path.stem


def test_every_notebook_has_expected_outputs():
  assert [f.stem for f in FILES] == sorted(OUTPUTS)


@pytest.mark.parametrize('path', FILES, ids=name)
def test_notebook_is_stored_without_outputs_and_traces_of_a_machine(path):
  """Every code cell is also valid Python with lines of at most 80 characters."""
  book = read(path)
  code = [cell for cell in book.cells if cell.cell_type == 'code']
  assert not [cell.id for cell in code if cell.outputs]
  assert not [cell.id for cell in code if cell.execution_count is not None]
  assert not [cell.id for cell in book.cells if cell.metadata]
  for cell in code:
    compile(cell.source, cell.id, 'exec')
    assert max(map(len, cell.source.splitlines())) <= 80, cell.id
  text = path.read_text('utf-8')
  paths = re.findall(r'/(?:home|root|work|tmp|Users|content|mnt|usr)/|[A-Z]:\\\\|~/', text)
  assert not paths, paths
  kernel = book.metadata.kernelspec
  assert (kernel.name, set(book.metadata)) == ('python3', {'kernelspec', 'language_info'})


@pytest.mark.parametrize('path', sorted((CLONE / 'docs/notebook_outputs').glob('*.json')), ids=name)
def test_stored_outputs_of_the_docs_are_of_the_current_notebook(path):
  """They are of the same code, have its figures, and show no path of a machine and no error."""
  stored = json.loads(path.read_text('utf-8'))
  cells = [cell for cell in read(CLONE / f'notebooks/{path.stem}.ipynb').cells if cell.cell_type == 'code']
  hint = f'run python docs/make_notebook_outputs.py {path.stem}'
  assert stored['code'] == [cell.source for cell in cells], hint
  assert len(stored['outputs']) == len(cells)
  outputs = [output for outputs_of_cell in stored['outputs'] for output in outputs_of_cell]
  assert sum('image/png' in output.get('data', {}) for output in outputs) == FIGURES[path.stem]
  text = json.dumps([{**output, 'data': {**output.get('data', {}), 'image/png': ''}} for output in outputs])
  assert not re.findall(r'/(?:home|root|work|tmp|Users|content|mnt|usr)/|Traceback|"stderr"', text)
  assert path.stat().st_size < 400_000


@pytest.mark.parametrize('path', FILES, ids=name)
def test_notebook_runs_and_shows_the_expected_outputs(path, tmp_path, monkeypatch):
  monkeypatch.setenv('JAXPOST_SHORT', '1')
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(CLONE), *filter(None, [os.environ.get('PYTHONPATH')])]))
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  work = tmp_path / 'work'
  work.mkdir()
  book = read(path)
  nbclient.NotebookClient(book, timeout=600, resources={'metadata': {'path': str(work)}}).execute()
  outputs = [output for cell in book.cells if cell.cell_type == 'code' for output in cell.outputs]
  text, position = '\n'.join(map(text_of, outputs)), 0
  text = re.sub(r'\x1b\[[\d;]*m', '', text)
  for pattern in OUTPUTS[path.stem]:
    match = re.compile(pattern).search(text, position)
    assert match, f'no {pattern!r} after {text[max(0, position - 200) : position]!r}'
    position = match.end()
  figures = ['image/png' in output.get('data', {}) for output in outputs]
  assert sum(figures) == FIGURES[path.stem]
  green = [o for o in outputs if 'color: #008000' in o.get('data', {}).get('text/html', '')]
  assert bool(green) == (path.stem in GREEN)
  for file in FILES_MADE[path.stem]:
    assert list(work.glob(f'runs/*/{file}')), file
