"""Writes docs/methods.md and docs/method_curves.json: what each method learns in about a minute.

  python docs/make_methods_table.py [METHOD ...]

Runs the cases of tests/learning.py (all, or those named; the others keep
their rows), on the machine it is started on, with seeds 0, 1 and 2. Sources
are those of docs/defaults.md, and below for options. Then run
docs/make_method_pages.py, which draws the curves.
"""

import json
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests'), str(ROOT / 'docs')]

import jaxpost  # noqa: E402

jaxpost.tune_host()
jaxpost.use_compile_cache()

import learning  # noqa: E402
import method_facts as facts  # noqa: E402

from jaxpost.stage import config as config_lib  # noqa: E402

CASES = learning.CASES | learning.VARIANTS
SEEDS = 0, 1, 2
HEAD = """# What each method learns

Use this table to see that a method works before you spend more on it, and which fields it was run with. Written by
`python docs/make_methods_table.py`.

A tiny Qwen3-style model (0.15 M parameters) was trained on sums of numbers up to 99, half of them with wrong answers.
Each method continues from this start on two CPU cores and is evaluated on held-out data. The table has the mean and the
standard deviation of seeds 0, 1 and 2, which draw different batches and samples. Most differences between methods are
smaller than that deviation: the task shows that a method learns, not which one is better.

* **Test**: `tests/test_learning.py` trains the rows above `gmpo` with seed 0 and requires a minimum gain of each.
* **Metrics**: pass@1 is measured on 256 sums with 4 samples each, the other metrics on 256 pairs or labels. Before
  training, policy and reference are equal, so all pairs tie, which counts as 0.5.
* **ORPO, CPO and SimPO** start from a model with a quarter of that training. SimPO has no term for chosen answers
  alone: it widens the margins of such a model and does not change its ranking of pairs.
* **OPSD and SDPO** start from a model that has also seen prompts with a hint, which says the sum, and right answers to
  them. They have no reward: the teacher is that model with the hint.
* **`mt_grpo` and `gigpo`** start from a model that plays the game of [environments.md](environments.md) at random, with
  a reward for each move in the right direction. pass@1 is the share of 64 games, each played four times, that the
  model wins by the first move.
* **Rows without backticks** are options of the algorithm in parentheses ([options](rl_options.md)).
* **Replay and surplus groups** have groups of two, which are often all right or all wrong, and six passes over 1,280
  sums. Curricula have three passes over 640.
* **Process rewards** grade solutions of two lines with an addition in each; half of the solutions of the start have an
  error. A verifier of both lines has twice the weight of the process rewards. The process reward model is right about
  97 % of held-out lines, since errors make odd sums of even terms. A process reward model for sums up to 99, which has
  to add, learned only that errors are in later lines, and taught nothing: compare a process reward model with such a
  rule first ([rewards](rewards.md)).
* **Machines**: all seeds of a row ran on one machine, but different rows ran on different machines. The starts are
  trained on these machines, too, so they differ (column "before").

[One page for each method](methods/index.md) has its formula, its defaults beside those of the paper, when to use it and
what goes wrong.

| method | metric | before | after | steps | its own choices | default and source | set here |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
"Its own choices" replace the defaults of these fields. Values in a config or on the command line take precedence. For
a method, the next column has its default learning rate, and the source of the rate and of the choices
([defaults](defaults.md)); for an option, it has the values of the option's paper.
"""


# The values that the papers of options use, and the papers.
OPTIONS = {
  'GDPO': 'arXiv:2601.05242',
  'LUFFY': '`rl.expert_gamma=0.1`, one expert and 7 samples; arXiv:2504.14945',
  'Clip-Cov': '`rl.clip_cov=0.0002`; arXiv:2505.22617',
  'KL-Cov': '`rl.kl_cov=0.002` (7B), 0.0002 (32B), `rl.kl_cov_coef=1.0`; arXiv:2505.22617',
  'top-entropy tokens': '`rl.top_entropy=0.2`; arXiv:2506.01939',
  'bypass': 'arXiv:2602.04879',
  'OPSD': 'a fixed teacher; arXiv:2601.18734',
  'SDPO': '`reference.mix=0.05`; arXiv:2601.20802',
  'rejection by k3': "verl's `rollout_rs`",
  'product masks': "TRL's `sequence_mask`",
  'kept sampling mask': 'top-p; arXiv:2512.02556',
  'adaptive entropy bonus': '`rl.entropy_target=0.2`, `rl.entropy_step=0.005`; arXiv:2505.22312',
  'KL weighted by the ratio': 'arXiv:2512.02556',
  'std of the others': "NeMo-RL's leave-one-out",
  'several teachers': 'equal weights; none',
  'process rewards': 'arXiv:2402.03300, section 4.1.3',
  'replay': 'arXiv:2505.16282',
  'prioritized prompts': 'arXiv:2501.12599, section 2.3.4',
  'retired prompts': 'the filter of arXiv:2503.14476, over steps',
  'surplus groups': 'none; arXiv:2503.14476 drops them',
  'moving average of the reference': '`reference.mix=0.6` (DPO); arXiv:2404.09656',
  'reset of the reference': '`reference.every=512` (DPO), arXiv:2404.09656; when progress stalls, arXiv:2505.24864',
}


def choices(case: dict) -> tuple[str, str]:
  """(what the method brings along, what the case sets beside it)."""
  plain = config_lib.defaults()

  def say(section, field, value):
    return f'`{section}.{field}={value}`'

  brought = [f'`{path}={value}`' for path, value in facts.brought(case['algorithm']).items()]
  chosen = [say(s, f, value) for s in facts.SECTIONS for f, value in case[s].items() if value != plain[s][f]]
  chosen.append(say('optim', 'lr', case['optim']['lr']))
  for field in ('staleness', 'top_k'):
    if case['rollout'][field]:
      chosen.append(say('rollout', field, case['rollout'][field]))
  if case['reward'] not in ('', 'exact_match'):
    chosen.append(f'`reward={case["reward"].replace(learning.__file__, "learning.py")}`')
  return ', '.join(brought), ', '.join(chosen)


def main(names):
  figures, curves = (facts.measured(), facts.curves()) if names else ({}, {})
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    for name in names or CASES:
      runs = [learning.measure(name, folder, seed) for seed in SEEDS]
      curves[name] = curve([run['rows'] for run in runs], runs[0]['metric'])
      if 'sft' not in curves and CASES[name].start == 'start':
        curves['sft'] = curve([learning.train_rows('start', folder)], 'loss')
      figures[name] = dict(
        metric=runs[0]['metric'],
        before=[run['before'] for run in runs],
        after=[run['after'] for run in runs],
        steps=runs[0]['steps'],
      )
      print(name, figures[name], flush=True)
      write(figures)
      facts.CURVES.write_text('{\n' + ',\n'.join(f'"{k}": {json.dumps(v)}' for k, v in curves.items()) + '\n}\n')


def curve(runs: list[list[dict]], metric: str) -> dict:
  """Returns the curve of train rows of each seed, at 50 to 100 steps: of `metric`, or else of what they have."""
  key = next(key for key in (metric, 'reward', 'divergence', 'loss') if key in runs[0][-1])
  stride = max(1, len(runs[0]) // 50)
  shared = [range(at, min(at + stride, len(runs[0]))) for at in range(0, len(runs[0]), stride)]
  seeds = [[float(f'{statistics.mean(rows[n][key] for n in at):.4g}') for at in shared] for rows in runs]
  return dict(metric=key, steps=[runs[0][at[-1]]['step'] for at in shared], seeds=seeds)


def write(figures: dict):
  rows = []
  for name, case in CASES.items():
    if name in figures:
      found, algorithm = figures[name], case.config['algorithm']
      label = f'`{name}`' if name == algorithm else f'{name} (`{algorithm}`)'
      after = f'{statistics.mean(found["after"]):.3f}'
      after += f' ± {statistics.stdev(found["after"]):.3f}' if len(found['after']) > 1 else ' (seed 0)'
      cells = label, found['metric'], f'{statistics.mean(found["before"]):.3f}', after, str(found['steps'])
      brought, chosen = choices(case.config)
      source = '`optim.lr={}`; {}'.format(*facts.SOURCES[name]) if name == algorithm else OPTIONS[name]
      rows.append(f'| {" | ".join((*cells, brought, source, chosen))} |')
  facts.TABLE.write_text(HEAD + '\n'.join(rows) + '\n' + TAIL + '\n' + facts.KEPT + json.dumps(figures) + ' -->\n')


if __name__ == '__main__':
  main(sys.argv[1:])
