"""Settings of the documentation site.

    pip install -e '.[docs]' && python -m sphinx -W -b html docs build/docs

Nothing is executed: notebooks are shown with the outputs of docs/notebook_outputs/ (docs/make_notebook_outputs.py).
`llms.txt` in the result lists all pages with one line each.

JAXPOST_REPOSITORY=https://github.com/ORG/NAME in the environment names the public repository, and JAXPOST_REVISION a
branch or a tag of it (`main` by default). Then pages link to their sources, the notebooks have "Open in Colab" badges,
and the commands of getting_started.md clone that address.
"""

import json
import os
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'docs')]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import stamp_badges  # noqa: E402

import jaxpost  # noqa: E402

REPOSITORY = stamp_badges.checked(os.environ.get('JAXPOST_REPOSITORY', ''))
REVISION = os.environ.get('JAXPOST_REVISION') or 'main'

project, author, copyright = 'jaxpost', 'the jaxpost authors', 'the jaxpost authors'
release = version = jaxpost.__version__
extensions = ['myst_nb', 'sphinx_design', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
html_theme, html_title = 'furo', f'jaxpost {release}'
if REPOSITORY:
  branch = 'main' if re.match(r'v?\d', REVISION) else REVISION  # a tag cannot be edited
  html_theme_options = dict(source_repository=REPOSITORY, source_branch=branch, source_directory='docs/')

smartquotes = False  # '' is a value
myst_heading_anchors = 4
myst_enable_extensions = ['colon_fence']  # of the tabs
nb_execution_mode = 'off'

default_role = 'py:obj'  # `name` is code, and a link where the name is documented
maximum_signature_line_length = 88
add_module_names = False
autodoc_default_options = {'members': True, 'member-order': 'bysource'}
autodoc_preserve_defaults = True
autodoc_typehints_format = 'short'
napoleon_use_ivar = True

_CODE = re.compile(r'(`+[^`]+`+)')
_MARKUP = re.compile(r'[\\*|]|_(?!\w)')
_ITEM = re.compile(r'[\w/, ]+: |\w+\(')  # `name: text`, or a call
_SECTION = re.compile(r'(Args|Attributes|Raises|Returns|Yields):\n')
_TITLE = re.compile(r' +[A-Z][\w-]* [\w -]*:')


def read_docstring(app, what, name, obj, options, lines):
  """Makes reST of a docstring: drawings and examples, lists of names, and no markup outside of `code`."""
  blocks, in_section = [], False
  for block in '\n'.join(lines).split('\n\n'):
    block = block.strip('\n')
    indented = all(line.startswith('  ') for line in block.split('\n'))
    in_section = bool(_SECTION.match(block)) or in_section and indented
    if in_section and _TITLE.fullmatch(block):  # the fields below it are a list of their own
      blocks += [block.strip(), 'Attributes:']
    elif indented and not in_section:
      blocks += ['::', block]
    else:
      blocks.append(_paragraph(block))
  lines[:] = '\n\n'.join(blocks).split('\n') + ['']


def _paragraph(text):
  """Escapes what reST would take for markup, and makes a list of lines that each begin with a name."""
  parts = _CODE.split(text)
  for n, part in enumerate(parts):
    if n % 2 == 0:
      part = _MARKUP.sub(r'\\\g<0>', part)
      parts[n] = re.sub(r'^(?=\w)', r'\\ ', part) if n else part  # `name`s
  lines = ''.join(parts).split('\n')
  items = [line for line in lines if line[:1].strip()]
  if len(items) > 1 and all(map(_ITEM.match, items)):
    lines = [f'* {line}' if line in items else f'  {line}' for line in lines]
  return '\n'.join(lines)


def short_signature(app, what, name, obj, options, signature, annotation):
  """A default that has no literal, such as <function f>, is written as `...`, so that lines can be broken."""
  return signature and re.sub(r'<(?:[^<>]|<locals>)*>', '...', signature), annotation


def copy_notebooks(app, config):
  """Sphinx reads only what is below docs/: copies notebooks/, with outputs, to docs/notebooks/, which git ignores."""
  shutil.rmtree(ROOT / 'docs/notebooks', ignore_errors=True)
  shutil.copytree(ROOT / 'notebooks', ROOT / 'docs/notebooks', ignore=shutil.ignore_patterns('.*'))
  for stored in (ROOT / 'docs/notebook_outputs').glob('*.json'):
    shown = ROOT / f'docs/notebooks/{stored.stem}.ipynb'
    book = json.loads(shown.read_text('utf-8'))
    cells = [cell for cell in book['cells'] if cell['cell_type'] == 'code']
    for cell, outputs in zip(cells, json.loads(stored.read_text('utf-8'))['outputs'], strict=True):
      cell['outputs'] = outputs
    if REPOSITORY:
      stamp_badges.stamp(book, stored.stem, REPOSITORY, REVISION)
    shown.write_text(json.dumps(book), 'utf-8')


def point_into_site(app, docname, source):
  """Rewrites links between docs/ and other folders whose files are pages of the site, and the address to clone."""
  source[0] = source[0].replace('](../notebooks/', '](notebooks/').replace('](../SECURITY.md', '](security.md')
  source[0] = source[0].replace('](../../notebooks/', '](../notebooks/')
  if docname.startswith('notebooks/'):
    source[0] = source[0].replace('](../docs/', '](../')
  if REPOSITORY and docname == 'getting_started':
    source[0] = source[0].replace('git clone URL ', f'git clone {REPOSITORY} ')


def edit_notebooks_above(app, pagename, templatename, context, doctree):
  """Links a notebook to its source, which is not in docs/ as its copy is."""
  if pagename.startswith('notebooks/'):
    context['theme_source_directory'] = ''


def write_llms_txt(app, error):
  """Writes llms.txt: what the landing page and the lists below list; a page that is made of others by itself."""
  if error or app.builder.name != 'html':
    return
  text = (ROOT / 'docs/index.md').read_text('utf-8')
  for title, folder in (('API', 'api'), ('Methods, one by one', 'methods')):
    listed = (ROOT / 'docs' / folder / 'index.md').read_text('utf-8')
    rows = re.findall(r'^\| \[(.*)\]\((.*)\) \| (.*) \|$', listed, re.M)
    text += '\n'.join([f'\n## {title}\n', *(f'* [{name}]({folder}/{page}): {about}' for name, page, about in rows), ''])
  lines = ['# jaxpost', '', '> Post-training of large language models, native to JAX.']
  for section, title, page, about in re.findall(r'^(?:## (.*)|\* \[(.*)\]\((?:\.\./)?(.*)\): (.*))$', text, re.M):
    made = '```{' in (ROOT / 'docs' / page).read_text('utf-8') if page else False
    where = str(pathlib.PurePosixPath(page).with_suffix('.html')) if made else f'_sources/{page}.txt'
    lines += ['', f'## {section}', ''] if section else [f'- [{title}]({where}): {about}']
  (pathlib.Path(app.outdir) / 'llms.txt').write_text('\n'.join(lines) + '\n', 'utf-8')


def setup(app):
  app.connect('autodoc-process-docstring', read_docstring, priority=100)  # before napoleon
  app.connect('autodoc-process-signature', short_signature)
  app.connect('config-inited', copy_notebooks)
  app.connect('source-read', point_into_site)
  app.connect('html-page-context', edit_notebooks_above)
  app.connect('build-finished', write_llms_txt)
