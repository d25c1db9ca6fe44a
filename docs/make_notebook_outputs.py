"""Writes docs/notebook_outputs/NAME.json: the outputs with which the site shows a notebook.

python docs/make_notebook_outputs.py [NAME ...]

Runs notebooks (01_sft_then_grpo, ...; all for none), each in a kernel and an empty folder of its own, and in full but
for those that download weights. The notebooks themselves are stored bare. Left out is what depends on the speed of
the machine: seconds, rates, lines of progress, and lines of steps but the first in each tenth of a run. Needs
`.[notebook]`.
"""

import json
import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'docs/notebook_outputs'
SHORT = ('05_lora_your_reward',)  # run as the tests do, with a tiny random model in place of a download
# A duration or a rate, such as `12.5 s` or `1,200 tokens/s`, and those of a line of metrics, such as `s/step 0.5`.
_TIMES = re.compile(r'\b\d[\d.,]*[kM]? ?(?=(?:us|ms|s|min|h|tokens/s|tok/s)\b)')
_METRICS = re.compile(r' +(?:tok/s|s/step|left) [\d.:,]+[kM]?')
_RATES = re.compile(r'^.*(?:Tokens per second|Seconds per step).*\n', re.MULTILINE)  # rows of a table
_COMMIT = re.compile(r' \([0-9a-f]{12}(?:-dirty)?\)')
_PROGRESS = re.compile(
  r'(?:compiling \d+/\d+: \S+|(?:evaluating|writing|loading weights of) \S+|[\w ]+)(?: \(… s\))?\n'
)
_STEP = re.compile(r'(?P<stage>\S+) (?P<step>\d+)/(?P<steps>\d+)  ')


def code_of(book: nbformat.NotebookNode) -> list[str]:
  """Returns the text of each code cell."""
  return [cell.source for cell in book.cells if cell.cell_type == 'code']


def untimed(text: str) -> str:
  """Returns a text without seconds, rates and the commit."""
  return _COMMIT.sub('', _RATES.sub('', _METRICS.sub('', _TIMES.sub('… ', text))))


def kept(outputs: list) -> list[dict]:
  """Returns the outputs of a cell as they are stored: one text for each stream, no warnings, pictures as PNG."""
  found: list[dict] = []
  for output in outputs:
    if output['output_type'] == 'error' or output.get('name') == 'stderr':
      continue
    output = {key: value for key, value in output.items() if key != 'execution_count'}
    if output['output_type'] == 'execute_result':
      output['output_type'] = 'display_data'
    if output['output_type'] == 'stream' and found and found[-1]['output_type'] == 'stream':
      found[-1]['text'] += output['text']
    else:
      found.append(output)
  for output in found:
    if output['output_type'] == 'stream':
      lines = output['text'].split('\n')
      output['text'] = '\n'.join(untimed(line.rsplit('\r', 1)[-1]) for line in lines)
      continue
    for kind in ('text/plain', 'text/html'):
      if kind in output['data']:
        output['data'][kind] = untimed(output['data'][kind])
  return thinned(found)


def thinned(outputs: list[dict]) -> list[dict]:
  """Returns outputs without repetitions and progress, and of lines of steps the first in each tenth of a run."""
  found: list[dict] = []
  tenth = ('', -1)  # the stage and its last tenth
  for output in outputs:
    text = output.get('data', {}).get('text/plain', '')
    if found and output == found[-1] or _PROGRESS.fullmatch(text):
      continue
    if line := _STEP.match(text):
      now = line['stage'], 10 * int(line['step']) // int(line['steps'])
      if now == tenth:
        continue
      tenth = now
    found.append(output)
  return found


def run(name: str) -> dict:
  """Runs a notebook; returns its code and the outputs of each code cell."""
  book = nbformat.read(ROOT / f'notebooks/{name}.ipynb', 4)
  with tempfile.TemporaryDirectory() as folder:
    nbclient.NotebookClient(book, timeout=3600, resources={'metadata': {'path': folder}}).execute()
  cells = [cell for cell in book.cells if cell.cell_type == 'code']
  return dict(code=code_of(book), outputs=[kept(cell.outputs) for cell in cells])


if __name__ == '__main__':
  FOLDER.mkdir(exist_ok=True)
  os.environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
  for stem in sys.argv[1:] or sorted(path.stem for path in (ROOT / 'notebooks').glob('*.ipynb')):
    os.environ.pop('JAXPOST_SHORT', None)
    if stem in SHORT:
      os.environ['JAXPOST_SHORT'] = '1'
    text = json.dumps(run(stem), indent=1, ensure_ascii=False)
    (FOLDER / f'{stem}.json').write_text(text + '\n', 'utf-8')
    print(stem, f'{len(text):,} bytes', flush=True)
