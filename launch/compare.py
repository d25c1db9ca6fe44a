"""Compares runs with the first of them.

  python -m launch.compare runs/a runs/b
  python -m launch.compare runs/a runs/b runs/c --out=compare.html

Prints the fields in which the configs differ, final figures, the difference of rewards on
prompts that both runs sampled in the same step, with a 95 % confidence interval, and the first
sample that differs. --out writes one HTML page with the curves of all. Uses no device.
"""

from absl import flags

from jaxpost.errors import InputError

_OUT = flags.DEFINE_string('out', '', 'HTML page to write as well.')
_STEPS = flags.DEFINE_integer('steps', 8, 'Paired differences to print, of the last steps.', lower_bound=1)


def main(argv):
  """Prints each comparison."""
  runs = argv[1:]
  if len(runs) < 2:
    raise InputError('name two or more folders of runs: launch.compare RUN RUN')
  import rich.console
  import rich.table
  from rich import markup

  from jaxpost.monitor import report
  from jaxpost.tools import compare_runs

  console = rich.console.Console(highlight=False)
  for run in runs[1:]:
    comparison = compare_runs.compare(runs[0], run)
    heads = [markup.escape(name) for name in comparison.names]
    table = rich.table.Table(*(rich.table.Column(name, overflow='fold') for name in ('config', *heads)))
    for key, values in comparison.fields.items():
      table.add_row(markup.escape(key), *(markup.escape(repr(value)) for value in values))
    console.print(table if comparison.fields else 'config: no field that decides what is computed differs')
    table = rich.table.Table('final figures', 'stage', *heads)
    for key, values in comparison.figures.items():
      key, _, stage = key.rpartition('/')
      named = markup.escape(report.title(key)), markup.escape(stage)
      table.add_row(*named, *('' if value is None else report.number(value) for value in values))
    console.print(table)
    for p in comparison.paired[-_STEPS.value :]:
      interval = (
        f'95 %: {report.number(p.low)} to {report.number(p.high)}' if p.prompts > 1 else 'one prompt has no interval'
      )
      console.out(
        f'reward, {p.stage} {p.split} step {p.step}: {report.number(p.first)} and {report.number(p.second)}, '
        f'difference {report.number(p.difference)} ({interval}; '
        f'{p.prompts} shared prompts, {p.samples} pairs)'
      )
    if comparison.sampled and not comparison.paired:
      console.out('reward: no prompt was sampled in the same step of both')
    if part := comparison.parting:
      where = f'{part.stage} {part.split} step {part.step}, sample {part.sample} of {part.prompt!r}'
      console.out(f'the first stored sample that differs is in {where}')
      first, second = comparison.names
      begin = f'  both begin: {part.shared!r}\n' if part.shared else ''
      console.out(f'{begin}  {first}: {part.first!r}\n  {second}: {part.second!r}')
  if _OUT.value:
    compare_runs.write_page(runs, _OUT.value)
    console.out(_OUT.value)


if __name__ == '__main__':
  from . import exits

  exits.run(main, words=99)
