"""Configs that train each method from one starting model in about a minute, and the metric that measures its gain.

tests/test_learning.py checks the gains; docs/make_methods_table.py writes them into docs/methods.md. The task is sums
of numbers up to 99; the starting model has seen worked examples, half of them right. Methods for turns play a game.
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
  """Returns the config that all cases share; `kind` is the kind of data ('_pairs', ...)."""
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
  """SFT on examples of which half are wrong, until the model has learned the mixture.

  Halfway there, it would be in a different place for each seed and each rounding.
  """
  return base(
    algorithm='sft',
    data=dict(path=SUMS.format('', 'train') + ',size=6000,correct=0.5'),
    train=dict(steps=1000),
    optim=dict(lr=3e-3, schedule='cosine'),
  )


def with_hint(row: dict) -> dict:
  """Adds a second prompt, which also states the sum: a column for `rl.privileged`."""
  return row | {'hint': [{'role': 'user', 'content': f'It is {row["answer"]}. {row["prompt"][-1]["content"]}'}]}


def after_hint(row: dict) -> dict:
  """Makes the prompt with the hint the prompt of the row."""
  return row | {'prompt': with_hint(row)['hint']}


def hinted_start_config() -> dict:
  """The common start, but also trained on prompts with a hint that are followed by right sums."""
  wrong, right = (f'{SUMS.format("", "train")},size=6000,correct={share}' for share in (0.5, 1))
  over = dict(data=dict(path=(wrong, right), map=('', f'{__file__}:after_hint')))
  return tiny.merged(start_config(), over)


def game(kind: str, **over) -> dict:
  """Returns the config of games; `kind` is the kind of rows ('treasure_played', ...)."""
  rows = dict(path='generated:arithmetic:max=99,ops=+,correct=1,size=4000', map=f'jaxpost.environments.examples:{kind}')
  fields = dict(
    environment=f'{pathlib.Path(__file__).parent / "game.py"}:Game', tools=dict(max_turns=2, workers=2), data=rows
  )
  fields |= dict(rollout=dict(max_prompt_length=80, max_new_tokens=160), train=dict(batch_size=8, row_length=256))
  return tiny.merged(tiny.merged(base(), fields), over)


def game_start_config() -> dict:
  """SFT on games with moves in random directions."""
  return game('treasure_played', algorithm='sft', train=dict(steps=300), optim=dict(lr=3e-3, schedule='cosine'))


def teacher_config(**over) -> dict:
  """SFT on right sums only, from the common start."""
  right = dict(path=SUMS.format('', 'train') + ',size=6000,correct=1')
  return tiny.merged(start_config(), dict(init_from='start', train=dict(steps=400), data=right) | over)


def in_steps(row: dict) -> dict:
  """Makes two small additions of the four digits of a sum, with a line for each.

  A wrong sum gets slips by one in the first line, the second, or both; these lines have false labels. All terms are
  even, so slips are odd, and a judge learns to tell them in 100 steps. Of sums up to 99 it would learn in 300 steps
  only that slips become likelier toward the end.
  """
  terms = [int(digit) % 3 * 2 for digit in '{:>02}{:>02}'.format(*row['prompt'][-1]['content'].strip('=').split('+'))]
  shown = int(row['completion'][0]['content'])
  slips = 0 if shown == int(row['answer']) else shown % 3 + 1  # a bit for each line
  pairs = [(f'{terms[n]}+{terms[n + 1]}=', terms[n] + terms[n + 1], slips >> n // 2 & 1) for n in (0, 2)]
  lines = [f'{sum_}{right + slip}' for sum_, right, slip in pairs]
  return dict(
    prompt=[{'role': 'user', 'content': '+'.join(map(str, terms))}],
    answer='\n'.join(f'{sum_}{right}' for sum_, right, _ in pairs),
    completions=lines,
    labels=[not slip for *_, slip in pairs],
    completion=[{'role': 'assistant', 'content': '\n'.join(lines)}],
  )


def all_lines(completions, answer, **columns) -> list[float]:
  """1 for completions that are right in all lines, else 0."""
  return [float(completion[-1]['content'] == right) for completion, right in zip(completions, answer)]


def to_solve(row: dict) -> dict:
  """Returns the prompt and the answer of `in_steps`, without a solution."""
  row_in_steps = in_steps(row)
  return dict(prompt=row_in_steps['prompt'], answer=row_in_steps['answer'])


def steps_data(map_: str) -> dict:
  """Sums, mapped by the function `map_` of this file; half of the solutions have slips."""
  rows = dict(path=SUMS.format('', 'train') + ',size=6000,correct=0.5', map=f'{__file__}:{map_}')
  return dict(data=rows, eval=dict(data=dict(map=rows['map'])))


def steps_start_config() -> dict:
  """SFT on solutions in steps."""
  return tiny.merged(start_config(), steps_data('in_steps') | dict(train=dict(steps=400, batch_size=8, row_length=192)))


def judge_config() -> dict:
  """A process reward model that starts from the model that writes solutions in steps."""
  fields = dict(algorithm='reward_model', init_from='steps', reward_model=dict(loss='process'))
  fields |= steps_data('in_steps') | dict(train=dict(steps=100, batch_size=8, row_length=192))
  return base(**fields, optim=dict(lr=2e-3, schedule='cosine'))


# The models that cases start from, learn from, or are graded by. A model is trained when a case first needs it.
MODELS = {
  'start': start_config,
  'early': lambda: tiny.merged(start_config(), dict(train=dict(steps=250))),
  'teacher': teacher_config,
  'other teacher': lambda: teacher_config(seed=1),
  'hinted': hinted_start_config,
  'game': game_start_config,
  'steps': steps_start_config,
  'judge': judge_config,
}


@dataclasses.dataclass(frozen=True)
class Case:
  """The run of a method from the common start.

  metric: of evaluation.
  gain: the least change that the test asks for; negative where the metric must fall.
  start: a model of `MODELS`. 'early' is a quarter of the way to 'start'; the later model ranks pairs so well that
    methods without a reference have nothing to learn.
  """

  config: dict
  metric: str = 'pass@1'
  gain: float = 0.05
  start: str = 'start'


def online(algorithm, steps=60, lr=8e-4, **over) -> Case:
  """An on-policy method, measured by the share of held-out answers that are right."""
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
  """A case at half the learning rate of `online`, at which the variants of docs/methods.md were measured."""
  return online(algorithm, lr=4e-4, **over)


def hinted(**over) -> Case:
  """A teacher that sees the answer. The reward has weight 0, so that it counts in evaluation only."""
  over = tiny.merged(dict(rl=dict(privileged='hint'), reward_weights=(0.0,)), over)
  over = tiny.merged(over, dict(data=dict(map=f'{__file__}:with_hint'), rollout=dict(max_prompt_length=64)))
  return dataclasses.replace(online('opd', lr=1e-3, **over), start='hinted')


def again(**over) -> Case:
  """A case with few prompts, which come again, for options that remember prompts."""
  rows = dict(data=dict(path=SUMS.format('', 'train') + ',size=640,correct=1'))
  return online('grpo', **tiny.merged(rows, over))


def of_two(**over) -> Case:
  """A case with groups of two, which are often all right or all wrong."""
  groups = dict(rollout=dict(prompts=128, group_size=2))
  return again(**tiny.merged(groups | dict(data=dict(path=SUMS.format('', 'train') + ',size=1280,correct=1')), over))


def by_steps() -> Case:
  """A process reward model grades each line, next to a verifier of all lines, which counts in evaluation."""
  graded = dict(reward=f'{__file__}:all_lines,reward_model', reward_weights=(1.0, 0.5))
  graded |= dict(reward_model=dict(path='judge', per_step=True), rollout=dict(max_new_tokens=24, prompts=16))
  graded |= steps_data('to_solve')
  # Until the critic knows how much reward is left, late tokens, and the end above all, seem worse than others.
  graded |= dict(critic=dict(lr=2e-3, warmup_steps=20), rl=dict(minibatches=2))
  return dataclasses.replace(online('ppo', **graded), start='steps')


def playing(algorithm, steps=60) -> Case:
  """A method in an environment, measured by the share of games in which the first move finds the treasure."""
  fields = dict(train=dict(steps=steps, row_length=0), optim=dict(lr=3e-4), rollout=dict(prompts=8, group_size=8))
  held_out = dict(path='generated:arithmetic:max=99,ops=+,correct=1,size=64,split=test')
  held_out |= dict(map='jaxpost.environments.examples:treasure')
  fields |= dict(eval=dict(samples=4, temperature=1.0, size=64, data=held_out))
  return Case(game('treasure', algorithm=algorithm, **fields), start='game')


def pairs(algorithm, lr=3e-4, steps=60, start='start', **over) -> Case:
  """A preference method, measured by the share of held-out pairs that are ranked right."""
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
  # SimPO has no term for good answers alone: it widens margins, but ranks no more pairs right than before.
  'simpo': dataclasses.replace(pairs('simpo', start='early'), metric='rewards/margins', gain=0.3),
  # At equal weights KTO mostly lowers bad answers, and all other answers with them.
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
      distill=dict(teachers=('teacher',)),
    ),
    'divergence',
    -0.03,
  ),
  'opd': online('opd', lr=1e-3, rl=dict(reference='teacher')),
  'gkd': online('gkd', distill=dict(teachers=('teacher',)), lr=1e-3, rollout=dict(prompts=64, group_size=2)),
}


# No test trains these. Some differ from a method above by a surrogate or an estimator, others are options of GRPO;
# tests/test_combinations.py compares them with exact gradients, and docs/methods.md has what they learn.
VARIANTS = {
  **{name: variant(name) for name in ('gmpo', 'dppo', 'gpg', 'opo', 'maxrl', 'pass_at_k')},
  # VAPO's alpha, 0.05, is for thousands of tokens: below 20 tokens it gives a lambda of 0.
  'vapo': variant('vapo', critic=dict(lr=2e-3), rl=dict(minibatches=2, length_alpha=6.0)),
  'GDPO': variant('grpo', reward='exact_match,regex_match?pattern=^[0-9]', rl=dict(advantage='gdpo')),
  'LUFFY': variant('grpo', rl=dict(expert=True, scale_rewards='none')),
  'Clip-Cov': variant('grpo', rl=dict(minibatches=4, clip_cov=2e-4)),
  'KL-Cov': variant('grpo', rl=dict(minibatches=4, kl_cov=2e-3)),
  'top-entropy tokens': online('grpo', rl=dict(top_entropy=0.2)),
  'bypass': variant('grpo', rollout=dict(staleness=1), rl=dict(old_policy='sampler')),
  **{name: online(name) for name in ('luspo', 'vespo', 'dro')},
  'ld_dpo': pairs('ld_dpo'),
  'wpo': pairs('wpo'),
  'OPSD': hinted(),
  'SDPO': hinted(reference=dict(every=1, mix=0.05)),
  'mt_grpo': playing('mt_grpo'),
  'gigpo': playing('gigpo'),
  'rejection by k3': variant('grpo', rollout=dict(staleness=1), rl=dict(importance=('sequence_k3',))),
  'product masks': variant('grpo', rollout=dict(staleness=1), rl=dict(importance=('product_mask',))),
  'kept sampling mask': variant('grpo', rollout=dict(top_k=8), rl=dict(sampling_mask=True, minibatches=2)),
  'adaptive entropy bonus': variant('grpo', rl=dict(entropy_target=0.4)),
  'KL weighted by the ratio': variant('grpo', rl=dict(kl_coef=0.05, kl_weighted=True, minibatches=4)),
  'std of the others': variant('rloo', rl=dict(scale_rewards='leave_one_out')),
  'several teachers': online('opd', lr=1e-3, distill=dict(teachers=('teacher', 'other teacher'))),
  'process rewards': by_steps(),
  'replay': of_two(rl=dict(replay=100)),
  'prioritized prompts': again(rl=dict(curriculum='prioritized')),
  'retired prompts': again(rl=dict(curriculum='retire')),
  'surplus groups': of_two(rl=dict(dynamic_sampling=10, keep_surplus=4)),
  'moving average of the reference': online('grpo', rl=dict(kl_coef=0.05), reference=dict(every=1, mix=0.1)),
  'reset of the reference': variant('grpo', rl=dict(kl_coef=0.05), reference=dict(every=20, reset_optimizer=True)),
}


def run(name: str, config: dict, folder: pathlib.Path) -> list[dict]:
  """Runs `config` anew and returns the rows of evaluation."""
  shutil.rmtree(folder / name, ignore_errors=True)
  jaxpost.run(config, folder / name, QUIET)
  return [row for row in metrics.read_rows(folder / name / 'metrics.jsonl') if row['split'] == 'eval']


def train_rows(name: str, folder: pathlib.Path) -> list[dict]:
  """Returns the train rows of a case that `measure` has run."""
  return tiny.rows(folder / name)


def model(name: str, folder: pathlib.Path) -> str:
  """Returns the folder of a model of `MODELS`, which is trained unless it exists."""
  if name and not (folder / name / 'summary.json').exists():
    run(name, located(MODELS[name](), folder), folder)
  return str(folder / name) if name else ''


def located(config: dict, folder: pathlib.Path) -> dict:
  """Replaces the names of models in a config by their folders."""
  folders = dict(
    init_from=model(config['init_from'], folder),
    distill=dict(teachers=tuple(model(name, folder) for name in config['distill']['teachers'])),
    rl=dict(reference=model(config['rl']['reference'], folder)),
    reward_model=dict(path=model(config['reward_model']['path'], folder)),
  )
  return tiny.merged(config, folders)


def measure(name: str, folder: pathlib.Path, seed: int = 0) -> dict:
  """Runs a case; returns {before, after, seconds, train rows}. `folder` keeps its run and the models of all cases."""
  case, start_time = (CASES | VARIANTS)[name], time.perf_counter()
  config = located(tiny.merged(case.config, dict(seed=seed, init_from=case.start)), folder)
  rows = run(name, config, folder)
  before, after = (row[case.metric] for row in (rows[0], rows[-1]))
  if case.metric == 'rewards/accuracies' and not before:
    before = 0.5  # nothing but ties: the policy is its reference
  result = dict(metric=case.metric, before=before, after=after, steps=config['train']['steps'])
  return result | dict(seconds=time.perf_counter() - start_time, rows=train_rows(name, folder))
