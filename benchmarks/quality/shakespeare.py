"""Cuts a text into rows as nanoGPT's character model reads it, for a comparison with its published loss.

    python -m benchmarks.quality.shakespeare input.txt FOLDER

writes FOLDER/train.jsonl and FOLDER/val.jsonl: the first 90 % of the characters and the rest, in rows of 64, the
context of nanoGPT's `train_shakespeare_char` on a CPU. docs/quality.md has the command that trains on them.
"""

import json
import pathlib
import sys

CONTEXT = 64  # characters


def rows(text: str) -> list[str]:
  """Returns whole rows of CONTEXT characters."""
  return [text[start : start + CONTEXT] for start in range(0, len(text) - CONTEXT + 1, CONTEXT)]


def main():
  """Writes the two files."""
  source, folder = map(pathlib.Path, sys.argv[1:])
  text = source.read_text('utf-8')
  folder.mkdir(parents=True, exist_ok=True)
  split = len(text) * 9 // 10
  for name, part in (('train', text[:split]), ('val', text[split:])):
    lines = ''.join(json.dumps({'text': row}) + '\n' for row in rows(part))
    (folder / f'{name}.jsonl').write_text(lines, 'utf-8')


if __name__ == '__main__':
  main()
