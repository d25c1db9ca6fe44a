"""Each method learns from one start in about a minute; one metric measures it.

`tests/test_learning.py` holds the gains; `docs/make_methods_table.py` writes
them into docs/methods.md. The task: sums of numbers up to 99, of which a tiny
model has seen worked examples, half of them right. Methods for turns play a game.
"""

import dataclasses
import pathlib
import shutil
import time

import rich.console
import tiny

import jaxpost
from jaxpost.monitor import metrics
from jaxpost.stage.config import defaults

QUIET = rich.console.Console(quiet=True)
SUMS = 'generated:arithmetic{}:max=99,ops=+,split={}'


def base(kind='', **over) -> dict:
  """The config that all cases share; `kind` of data ('_pairs', ...)."""
  return tiny.merged(
    tiny.merged(
      defaults(),
      dict(
        model=dict(preset='nano'),
        data=dict(path=SUMS.format(kind, 'train') + ',size=6000'),
        train=dict(batch_size=32, row_length=128),
        optim=dict(b2=0.98, warmup_steps=5),
        rollout=dict(max_prompt_length=32, max_new_tokens=4, prompts=32, group_size=8),
        eval=dict(size=256, data=dict(path=SUMS.format(kind, 'test') + ',size=256')),
        save=dict(export=False),
        log=dict(tensorboard=False),
      ),
    ),
    over,
  )


def start_config() -> dict:
  """SFT on examples of which a good part is wrong.

  Until it has learned what they teach: the middle of that way is elsewhere
  with every seed and every rounding.
  """
  return base(
    algorithm='sft',
    data=dict(path=SUMS.format('', 'train') + ',size=6000,correct=0.5'),
    train=dict(steps=1000),
    optim=dict(lr=3e-3, schedule='cosine'),
  )


def with_hint(row: dict) -> dict:
  """Adds a second prompt, which says the sum as well: a column for `rl.privileged`."""
  return row | {'hint': [{'role': 'user', 'content': f'It is {row["answer"]}. {row["prompt"][-1]["content"]}'}]}


def after_hint(row: dict) -> dict:
  """Makes that prompt the prompt of the row."""
  return row | {'prompt': with_hint(row)['hint']}


def hinted_start_config() -> dict:
  """The common start, which has also seen prompts with a hint, and they were followed by right sums."""
  wrong, right = (f'{SUMS.format("", "train")},size=6000,correct={share}' for share in (0.5, 1))
  over = dict(data=dict(path=(wrong, right), map=('', f'{__file__}:after_hint')))
  return tiny.merged(start_config(), over)


def game(kind: str, **over) -> dict:
  """The config of games; `kind` of rows ('treasure_played', ...)."""
  rows = dict(path='generated:arithmetic:max=99,ops=+,correct=1,size=4000', map=f'jaxpost.environments.examples:{kind}')
  played = dict(
    environment=f'{pathlib.Path(__file__).parent / "game.py"}:Game', tools=dict(max_turns=2, workers=2), data=rows
  )
  played |= dict(rollout=dict(max_prompt_length=80, max_new_tokens=160), train=dict(batch_size=8, row_length=256))
  return tiny.merged(tiny.merged(base(), played), over)


def game_start_config() -> dict:
  """SFT on games with moves in random directions."""
  return game('treasure_played', algorithm='sft', train=dict(steps=300), optim=dict(lr=3e-3, schedule='cosine'))


# The starts of some variants. The first of them that is measured makes its start.
STARTS = {'hinted': hinted_start_config, 'game': game_start_config}


@dataclasses.dataclass(frozen=True)
class Case:
  """A method's run from the common start.

  metric: of evaluation.
  gain: the least change that the test asks for; below 0 where it must fall.
  start: 'early' is a quarter of the way to 'start', whose rankings of pairs
    leave nothing to learn where there is no reference to beat.
  """

  config: dict
  metric: str = 'pass@1'
  gain: float = 0.05
  start: str = 'start'


def online(algorithm, steps=60, lr=8e-4, **over) -> Case:
  """On-policy: the share of held-out answers that are right."""
  return Case(
    tiny.merged(
      base(
        algorithm=algorithm,
        reward='exact_match',
        data=dict(path=SUMS.format('', 'train') + ',size=6000,correct=1'),
        train=dict(steps=steps, row_length=0),
        optim=dict(lr=lr, schedule='linear'),
        eval=dict(samples=4, temperature=1.0),
      ),
      over,
    ),
    gain=0.12,
  )


def variant(algorithm, **over) -> Case:
  """Returns a case at half the learning rate of `online`, at which the variants of docs/methods.md were measured."""
  return online(algorithm, lr=4e-4, **over)


def hinted(**over) -> Case:
  """A teacher that sees the answer, and no reward: its weight is 0, so that it counts in evaluation only."""
  over = tiny.merged(dict(rl=dict(privileged='hint'), reward_weights=(0.0,)), over)
  over = tiny.merged(over, dict(data=dict(map=f'{__file__}:with_hint'), rollout=dict(max_prompt_length=64)))
  return dataclasses.replace(online('opd', lr=1e-3, **over), start='hinted')


def playing(algorithm, steps=60) -> Case:
  """In an environment: the share of games in which the treasure is found by the first move."""
  fields = dict(train=dict(steps=steps, row_length=0), optim=dict(lr=3e-4), rollout=dict(prompts=8, group_size=8))
  held_out = dict(path='generated:arithmetic:max=99,ops=+,correct=1,size=64,split=test')
  held_out |= dict(map='jaxpost.environments.examples:treasure')
  fields |= dict(eval=dict(samples=4, temperature=1.0, size=64, data=held_out))
  return Case(game('treasure', algorithm=algorithm, **fields), start='game')


def pairs(algorithm, lr=3e-4, steps=60, start='start', **over) -> Case:
  """Preferences: the share of held-out pairs that are put right."""
  return Case(
    tiny.merged(base('_pairs', algorithm=algorithm, train=dict(steps=steps), optim=dict(lr=lr)), over),
    'rewards/accuracies',
    start=start,
  )


CASES = {
  'grpo': online('grpo'),
  'dr_grpo': online('dr_grpo'),
  'dapo': online('dapo'),
  'gspo': online('gspo'),
  'cispo': online('cispo'),
  'sapo': online('sapo'),
  'rloo': online('rloo'),
  'reinforce_pp': online('reinforce_pp'),
  'reinforce_pp_baseline': online('reinforce_pp_baseline'),
  'remax': online('remax', steps=100),
  'ppo': online('ppo', critic=dict(lr=2e-3), rl=dict(minibatches=2)),
  'rft': online('rft'),
  'online_dpo': online('online_dpo', steps=100),
  'dpo': pairs('dpo'),
  'orpo': pairs('orpo', 2e-3, steps=160, start='early', optim=dict(schedule='linear')),
  'cpo': pairs('cpo', 1e-3, steps=160, start='early', optim=dict(schedule='linear')),
  # It has no term for good answers alone: it widens margins, and ranks as many pairs rightly as before.
  'simpo': dataclasses.replace(pairs('simpo', start='early'), metric='rewards/margins', gain=0.3),
  # At equal weights it rather lowers bad answers and all others with them.
  'kto': pairs(
    'kto',
    lr=5e-4,
    preference=dict(undesirable_weight=0.2),
    data=dict(path=SUMS.format('_labels', 'train') + ',size=6000'),
    eval=dict(data=dict(path=SUMS.format('_labels', 'test') + ',size=256')),
  ),
  'reward_model': pairs('reward_model', lr=1e-3),
  'distill': Case(
    base(
      algorithm='distill',
      train=dict(steps=60),
      optim=dict(lr=1e-3, schedule='linear'),
      distill=dict(teachers=('TEACHER',)),
    ),
    'divergence',
    -0.03,
  ),
  'opd': online('opd', lr=1e-3, rl=dict(reference='TEACHER')),
  'gkd': online('gkd', distill=dict(teachers=('TEACHER',)), lr=1e-3, rollout=dict(prompts=64, group_size=2)),
}


# No test trains these. Some differ from a method above by a surrogate or an estimator, others are options of GRPO;
# tests/test_combinations.py compares them with exact gradients, and docs/methods.md has what they learn.
VARIANTS = {
  **{name: variant(name) for name in ('gmpo', 'dppo', 'gpg', 'opo', 'maxrl', 'pass_at_k')},
  # Its alpha is for thousands of tokens: below 20 tokens, 0.05 makes a lambda of 0.
  'vapo': variant('vapo', critic=dict(lr=2e-3), rl=dict(minibatches=2, length_alpha=6.0)),
  'GDPO': variant('grpo', reward='exact_match,regex_match?pattern=^[0-9]', rl=dict(advantage='gdpo')),
  'LUFFY': variant('grpo', rl=dict(expert=True, scale_rewards='none')),
  'Clip-Cov': variant('grpo', rl=dict(minibatches=4, clip_cov=2e-4)),
  'KL-Cov': variant('grpo', rl=dict(minibatches=4, kl_cov=2e-3)),
  'top-entropy tokens': variant('grpo', rl=dict(top_entropy=0.2)),
  'bypass': variant('grpo', rollout=dict(staleness=1), rl=dict(old_policy='sampler')),
  **{name: online(name) for name in ('luspo', 'vespo', 'dro')},
  'ld_dpo': pairs('ld_dpo'),
  'wpo': pairs('wpo'),
  'OPSD': hinted(),
  'SDPO': hinted(reference=dict(every=1, mix=0.05)),
  'mt_grpo': playing('mt_grpo'),
  'gigpo': playing('gigpo'),
  'reset of the reference': variant('grpo', rl=dict(kl_coef=0.05), reference=dict(every=20, reset_optimizer=True)),
}


def run(name: str, config: dict, folder: pathlib.Path) -> list[dict]:
  """The rows of evaluation."""
  shutil.rmtree(folder / name, ignore_errors=True)
  jaxpost.run(config, folder / name, QUIET)
  return [row for row in metrics.read_rows(folder / name / 'metrics.jsonl') if row['split'] == 'eval']


def train_rows(name: str, folder: pathlib.Path) -> list[dict]:
  """Returns the train rows of a case that `measure` has run."""
  return [row for row in metrics.read_rows(folder / name / 'metrics.jsonl') if row['split'] == 'train']


def make_start(folder: pathlib.Path):
  """The starts, and a teacher that has seen right sums only."""
  run('start', start_config(), folder)
  run('early', tiny.merged(start_config(), dict(train=dict(steps=250))), folder)
  run(
    'teacher',
    tiny.merged(
      start_config(),
      dict(
        init_from=str(folder / 'start'),
        train=dict(steps=400),
        data=dict(path=SUMS.format('', 'train') + ',size=6000,correct=1'),
      ),
    ),
    folder,
  )


def measure(name: str, folder: pathlib.Path, seed: int = 0) -> dict:
  """{before, after, seconds} of a case, whose start is in `folder`."""
  case, begun = (CASES | VARIANTS)[name], time.perf_counter()
  if case.start in STARTS and not (folder / case.start).exists():
    run(case.start, STARTS[case.start](), folder)
  config = tiny.merged(case.config, dict(seed=seed, init_from=str(folder / case.start)))
  if config['distill']['teachers']:
    config = tiny.merged(config, dict(distill=dict(teachers=(str(folder / 'teacher'),))))
  if config['rl']['reference']:
    config = tiny.merged(config, dict(rl=dict(reference=str(folder / 'teacher'))))
  rows = run(name, config, folder)
  before, after = (row[case.metric] for row in (rows[0], rows[-1]))
  if case.metric == 'rewards/accuracies' and not before:
    before = 0.5  # nothing but ties: the policy is its reference
  return dict(
    metric=case.metric, before=before, after=after, steps=config['train']['steps'], seconds=time.perf_counter() - begun
  )
