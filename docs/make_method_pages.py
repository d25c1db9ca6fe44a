"""Writes docs/methods/: a page for each method, and the list of them.

python docs/make_method_pages.py

Formulas, advice and the papers' values are in docs/method_texts.toml. Defaults are those of the code, papers and
differences those of docs/defaults.md, and what was measured is in docs/methods.md and docs/method_curves.json: nothing
is trained here.
"""

import inspect
import os
import pathlib
import re
import sys
import textwrap
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'docs')]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import method_facts as facts  # noqa: E402

from jaxpost.losses import preferences  # noqa: E402
from jaxpost.monitor import display  # noqa: E402
from jaxpost.stage import algorithms  # noqa: E402

FOLDER = ROOT / 'docs/methods'
TEXTS = tomllib.loads((ROOT / 'docs/method_texts.toml').read_text('utf-8'))
CURVES = {
  name: keys
  for names, keys in tomllib.loads((ROOT / 'jaxpost/monitor/curves.toml').read_text('utf-8'))['methods'].items()
  for name in names.split()
}
COLORS = '#3b82f6', '#f97316', '#10b981'  # of the seeds
MADE = '<!-- Written by docs/make_method_pages.py from docs/method_texts.toml. -->'
FAMILIES = {
  'On data': 'Methods without rewards, or with rewards that only select what is learned.',
  'Preferences': 'Methods that learn from pairs, labels or scores of given answers.',
  'Teachers': 'Methods that learn the probabilities of another model.',
  'Groups of samples': 'Methods that compare the rewards of several samples of a prompt, with different surrogates.',
  'Baselines': 'Methods that differ in what they subtract from a reward, or divide it by.',
  'Off policy': 'Surrogate losses for samples that are older than the policy.',
  'Turns': 'Methods for episodes in an environment, with an advantage for each turn.',
  'With a critic': 'Methods that learn a value model instead of comparing a group.',
}
HEAD = f"""# One page for each method

{MADE}

Use these pages to choose a method and to look up what it computes. `config.algorithm` selects the method. Each page has
the formula that jaxpost computes, the differences from the paper, the defaults, a command, measurements, when to use
the method, and what can go wrong, with the metric that shows it. [Which choices go together](../combinations.md) lists
the parts of policy gradients that you can combine.

## Notation

```
y, y_t       an answer, and its token t; sums and means over tokens are over the trained ones
pi           the policy that is trained
pi_old       the policy before the updates of a rollout, or the sampler (rl.old_policy)
mu           the policy that sampled, as the sampler computed it
ref          the reference model
r_t          pi(y_t) / pi_old(y_t); log r_t is clamped to [-20, 20]
R_i          sum of the rewards of sample i, each times its weight (reward_weights)
mean, std    over the samples of a group that have a reward; std is unbiased; a group without variance gives exactly 0
A, H_t       the advantage, and the entropy of the next token
sg(x)        x, without a gradient
clip_low     and other names with an underscore are fields of the config, in the sections that the tables name
```

Policy gradients and `online_dpo` compute log-probs from logits / `rollout.temperature`. Every policy gradient can also
have the terms of [options](../rl_options.md): a KL in the loss (`rl.kl_coef`), an entropy bonus (`rl.entropy_coef`),
and weights for old samples (`rl.importance`). They are off by default, and only the page of `grpo` writes them out.
"""


def pages() -> dict[str, str]:
  """Returns {file below docs/methods: text}, of pages and drawings."""
  shared = {}
  for name in TEXTS:
    shared.setdefault(TEXTS[name]['page'], []).append(name)
  written = {f'{file}.md': page(names) for file, names in shared.items()}
  drawn = {f'{name}.svg': drawing(found) for name, found in facts.curves().items() if name in TEXTS}
  return {'index.md': index(shared)} | written | drawn


def index(shared: dict[str, list[str]]) -> str:
  """Returns the list of pages; `shared` is {page: its methods}."""
  lines = [HEAD]
  for family, about in FAMILIES.items():
    lines += [f'## {family}', '', about, '', '| page | what it does |', '|---|---|']
    for file, names in shared.items():
      if TEXTS[names[0]]['family'] == family:
        lines.append(f'| [{", ".join(names)}]({file}.md) | {TEXTS[names[0]]["about"]} |')
    lines.append('')
  return '\n'.join([*lines, '```{toctree}', ':hidden:', *shared, '```', ''])


def page(names: list[str]) -> str:
  """Returns the page of one method, or of several with a heading each."""
  lines = [f'# {", ".join(names)}', '', MADE, '']
  for name in names:
    alone = len(names) == 1
    lines += [] if alone else [f'## {name}', '']
    lines += sections(name, '##' if alone else '###')
  return '\n'.join(lines).rstrip() + '\n'


def sections(name: str, mark: str) -> list[str]:
  """Returns the lines of one method below its heading; `mark` begins its own headings."""
  text = TEXTS[name]
  files = [f'algorithms/{algorithms.ALGORITHMS[name].partition(":")[0]}.py', *text.get('code', ())]
  about = [f'**{text["title"]}**: {text["about"]}.']
  about += [', '.join(f'[arXiv:{paper}](https://arxiv.org/abs/{paper})' for paper in papers(name)) + '.']
  about += [f'Code: {", ".join(f"`{file}`" for file in files)}. Data: [columns](../data_formats.md#{text["data"]}).']
  file, _, rest = text['command'].partition(' ')
  command = f'python -m launch.train --config={file} --workdir=runs/{name}' + (f' \\\n  {rest}' if rest else '')
  shown = ', '.join(f'`{key.replace("*", "NAME")}`' for key in CURVES[name])
  return [
    *(wrapped(part) for part in about),
    '',
    *(f'{mark} Formula', '', '```', text['formula'].strip('\n'), '```', ''),
    *(wrapped(f'[Notation](index.md#notation). {text.get("note", "")}'), '', *differences(name)),
    *(pair_losses(mark) if name == 'dpo' else ()),
    *(f'{mark} Config', '', '```', command, '```', '', *defaults(name)),
    *(f'{mark} What was measured', '', *measured(name)),
    *(f'{mark} When to use it', '', *(wrapped(item, '* ') for item in text['when']), ''),
    *(f'{mark} Pitfalls', '', *(wrapped(item, '* ') for item in text['pitfalls']), ''),
    *(wrapped(f'The report shows these metrics first, if the run has them: {shown} ([metrics](../metrics.md)).'), ''),
  ]


def papers(name: str) -> list[str]:
  """Returns arXiv numbers: that of the method, then those of its parts."""
  first = re.findall(r'arXiv:(\d+\.\d+)', facts.SOURCES[name][1])[:1]
  return list(dict.fromkeys([*first, *TEXTS[name].get('papers', ())]))


def differences(name: str) -> list[str]:
  """Returns the table of differences between code and paper from docs/defaults.md; [] if it has none."""
  found = []
  for names, here, there in facts.DIFFERENCES:
    if f'`{name}`' in names:
      case = re.sub(r'^`\w+`(?:, `\w+`)* ?', '', names)  # such as: with `rl.privileged`
      found.append(f'| {case}{": " if case else ""}{here} | {there} |')
  title = 'Where it differs from the paper ([all differences](../defaults.md#where-a-method-differs-from-its-paper)):'
  return [title, '', '| here | in the paper |', '|---|---|', *found, ''] if found else []


def pair_losses(mark: str) -> list[str]:
  """Returns the table of the losses of pairs; what each computes is the first paragraph of its docstring."""
  lines = [f'{mark} Losses of pairs', '']
  lines += [
    '`preference.losses` names one or several of these losses. s is the sigmoid, and d is c - r, without beta:',
    '',
  ]
  lines += ['| name | loss, and its paper | also reads | reference |', '|---|---|---|---|']
  for name, loss in preferences.LOSSES.items():
    about = ' '.join(inspect.getdoc(loss.fn).split())
    reads = ', '.join(f'`preference.{field}`' for field in loss.reads)
    lines.append(f'| `{name}` | {about} | {reads} | {"yes" if loss.needs_reference else "no"} |')
  return [*lines, '']


def defaults(name: str) -> list[str]:
  """Returns the table of a method's defaults, beside those of its paper."""
  paper, config = TEXTS[name].get('paper', {}), facts.resolved(name)
  lines = ['| field | default | in the paper |', '|---|---|---|']
  for path in dict.fromkeys(['optim.lr', *facts.brought(name), *paper]):
    shown = str(facts.value(config, path)).replace('e-0', 'e-')
    lines.append(f'| `{path}` | {shown} | {paper.get(path, "")} |')
  rate = f'{facts.resolved(name, lora=dict(rank=8)).optim.lr:.0e}'.replace('e-0', 'e-')
  return [
    *lines,
    '',
    f'With `lora.rank`, the default of `optim.lr` is {rate}. [Defaults](../defaults.md) has the source of each value.',
    '',
  ]


def measured(name: str) -> list[str]:
  """Returns what docs/methods.md has of a method, and of options that were measured with it."""
  found = re.findall(r'^\| (.*) \|$', facts.TABLE.read_text('utf-8'), re.M)
  rows = {cells[0]: cells for cells in (line.split(' | ') for line in found)}
  lines = [wrapped(TEXTS[name]['measured']), ''] if 'measured' in TEXTS[name] else []
  if f'`{name}`' in rows:
    _, metric, before, after, steps, *_, chosen = rows[f'`{name}`']
    seeds = ', '.join(f'{x:.3f}' for x in facts.measured()[name]['after'])
    text = (
      f'On the small task of [methods.md](../methods.md), `{metric}` goes from {before} to {after} in {steps} steps, '
    )
    text += f'with {chosen}; a model of 0.15 M parameters needs such a rate. Seeds 0, 1 and 2 end at {seeds}. '
    lines += [wrapped(text + 'Most differences between methods are smaller than those between seeds.'), '']
  if found := facts.curves().get(name):
    whose = 'of each seed' if len(found['seeds']) > 1 else 'of the SFT from which the table starts'
    lines += [f'![{display.title(found["metric"])} over {found["steps"][-1]} steps]({name}.svg)', '']
    lines += [wrapped(f'`{found["metric"]}` on the trained batches, {whose}, averaged over neighboring steps.'), '']
  options = [cells for label, cells in rows.items() if label.endswith(f'(`{name}`)')]
  if options:
    lines += ['These [options](../rl_options.md) were measured with the method:', '']
    lines += ['| option | metric | before | after | set here |', '|---|---|---|---|---|']
    for label, metric, before, after, *_, chosen in options:
      lines.append(f'| {label.rpartition(" (")[0]} | {metric} | {before} | {after} | {chosen} |')
    lines.append('')
  return lines


def drawing(found: dict) -> str:
  """Returns the curves of a case as SVG, in colors that are legible on light and dark pages."""
  width, height, left, top = 460, 190, 52, 22
  points = {f'seed {n}': list(zip(found['steps'], values)) for n, values in enumerate(found['seeds'])}
  drawn = display.chart(found['metric'], points, 0)
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 24} {top + height + 26}" width="560"',
    ' font-family="sans-serif" font-size="11" fill="#7a8699" stroke-linejoin="round">',
    f'<text x="{left}" y="12" font-weight="bold">{display.title(found["metric"])}</text>',
  ]
  for n, line in enumerate(drawn['lines']):
    path = ' '.join(f'{left + width * x:.1f},{top + height * y:.1f}' for x, y in line['path'])
    lines.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[n]}" stroke-width="1.8"/>')
    place = left + width - 56 * (len(points) - 1 - n)
    lines.append(f'<text x="{place}" y="12" text-anchor="end" fill="{COLORS[n]}">{line["split"]}</text>')
  for y, value in drawn['rules']:
    down = top + height * y
    lines.append(f'<path d="M{left} {down:.1f}h{width}" stroke="#7a8699" stroke-opacity="0.3"/>')
    lines.append(f'<text x="{left - 8}" y="{down + 4:.1f}" text-anchor="end">{value:g}</text>')
  for x, step in drawn['steps']:
    lines.append(f'<text x="{left + width * x:.1f}" y="{top + height + 18}" text-anchor="middle">{step}</text>')
  return '\n'.join([*lines, '</svg>', ''])


def wrapped(text: str, bullet: str = '') -> str:
  """Returns text in lines of at most 120 characters."""
  options = dict(subsequent_indent=' ' * len(bullet), break_on_hyphens=False, break_long_words=False)
  return textwrap.fill(bullet + text.strip(), 120, **options)


if __name__ == '__main__':
  FOLDER.mkdir(exist_ok=True)
  for file, text in pages().items():
    (FOLDER / file).write_text(text, encoding='utf-8')
