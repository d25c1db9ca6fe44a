"""Gives the notebooks an "Open in Colab" badge, once the repository has a public address.

python docs/stamp_badges.py https://github.com/ORG/NAME [REVISION]
python docs/stamp_badges.py

The first command writes the address into every notebook of notebooks/: a badge below the title, and what the
install cell clones where it finds no checkout, as on Colab. REVISION is a branch or a tag, `main` by default. A
notebook that was stamped before gets the new address; the second command takes the address out again. The site
(docs/conf.py) does the same with its copies, by the environment variables JAXPOST_REPOSITORY and JAXPOST_REVISION.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
_ADDRESS = re.compile(r'https://github\.com/[\w.-]+/[\w.-]+')
_BADGE = re.compile(r'\[!\[Open in Colab\][^\n]*\n\n')
_CLONED = re.compile(r"^(REPOSITORY, REVISION) = '.*', '.*'$", re.M)


def checked(repository: str) -> str:
  """Returns an address without what follows the name; raises ValueError where it is none that Colab can open."""
  repository = repository.rstrip('/').removesuffix('.git')
  if repository and not _ADDRESS.fullmatch(repository):
    raise ValueError(f'{repository!r} is no address of the form https://github.com/ORG/NAME')
  return repository


def badge(name: str, repository: str, revision: str) -> str:
  """Returns the Markdown of the badge that opens notebooks/NAME.ipynb in Colab."""
  page = repository.replace('https://github.com', 'https://colab.research.google.com/github')
  picture = 'https://colab.research.google.com/assets/colab-badge.svg'
  return f'[![Open in Colab]({picture})]({page}/blob/{revision}/notebooks/{name}.ipynb)'


def stamp(book: dict, name: str, repository: str, revision: str = 'main') -> dict:
  """Writes the address into a notebook, and returns it; '' takes it out.

  Args:
    book: the notebook as it is in its file; its first cell begins with the title, and its second installs jaxpost.
    name: its file without the suffix.
    repository: what `checked` returns.
    revision: a branch or a tag.
  """
  about, install = book['cells'][:2]
  title, text = ''.join(about['source']).split('\n\n', 1)
  text = _BADGE.sub('', text)
  if repository:
    text = f'{badge(name, repository, revision)}\n\n{text}'
  about['source'] = f'{title}\n\n{text}'.splitlines(keepends=True)
  given = f"'{repository}', '{revision if repository else 'main'}'"
  code, count = _CLONED.subn(lambda found: f'{found[1]} = {given}', ''.join(install['source']))
  assert count == 1, f'{name}: the second cell has no line REPOSITORY, REVISION'
  install['source'] = code.splitlines(keepends=True)
  return book


def main(root: pathlib.Path, repository: str = '', revision: str = 'main') -> None:
  """Stamps the notebooks of a clone, and the code beside their stored outputs, which has to be the same."""
  repository = checked(repository)
  for path in sorted((root / 'notebooks').glob('*.ipynb')):
    book = stamp(json.loads(path.read_text('utf-8')), path.stem, repository, revision)
    files = {path: book}
    outputs = root / f'docs/notebook_outputs/{path.stem}.json'
    if outputs.exists():
      files[outputs] = json.loads(outputs.read_text('utf-8'))
      files[outputs]['code'][0] = ''.join(book['cells'][1]['source'])
    for file, content in files.items():
      file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + '\n', 'utf-8')
    print(path.relative_to(root), f'opens from {repository} at {revision}' if repository else 'has no address')


if __name__ == '__main__':
  main(ROOT, *sys.argv[1:])
