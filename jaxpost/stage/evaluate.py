"""Evaluates during training: the loss on held-out documents, and pass@k from samples; and names the metrics.

Legend: N prompts, n samples per prompt.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.data import packing
from jaxpost.distributed import watchdog
from jaxpost.distributed.transfer import to_host
from jaxpost.errors import InputError, refuse
from jaxpost.programs import score
from jaxpost.stage.algorithms import ALGORITHMS
from jaxpost.types import Batch, Outputs, Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.algorithms.base import Algorithm
  from jaxpost.data.examples import Example
  from jaxpost.programs.compile import Program
  from jaxpost.rewards.groups import Graded
  from jaxpost.rl.grading import Grader
  from jaxpost.roles import Roles
  from jaxpost.rollout.sampler import Sampler
  from jaxpost.stage.config import Config
  from jaxpost.stage.place import PlacedStage


@dataclasses.dataclass
class Evaluator:
  """The evaluations of `config.eval`. Call it with the roles and the step."""

  held_out: HeldOut | None = None
  sampled: SampledEval | None = None

  @watchdog.slow_operation('an evaluation')
  def __call__(self, roles: Roles, step: int) -> tuple[dict, list[dict]]:
    """Returns (metrics, rows about samples)."""
    metrics: dict[str, float] = {}
    rows: list[dict] = []
    if self.sampled is not None:
      metrics, rows = self.sampled(roles, step)
    if self.held_out is not None:
      metrics |= self.held_out(roles)
    return metrics, rows


@dataclasses.dataclass
class HeldOut:
  """The objective and its metrics on held-out documents.

  batches: host batches, whose token weights are normalized over all of them together.
  program: `programs.score.make_evaluate`.
  prepare: (placed batch, roles) -> batch, as in training.
  """

  batches: Iterable[Batch]
  program: Program
  prepare: Callable[[Batch, Roles], Batch]

  def __call__(self, roles: Roles) -> dict:
    """Returns {metric: mean over all documents}, whatever batches they are in."""
    policy = roles.policy
    totals: dict[str, float] = {}
    for batch in self.batches:
      placed = self.prepare(policy.place(batch), roles)
      sums = to_host(self.program(policy.state.params, placed, policy.state.step, policy.frozen))
      for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + float(value)
    # Losses of preference pairs and of labels are no negative log-likelihoods.
    if set(totals) >= {'loss', 'entropy'} and 'rewards/chosen' not in totals:
      nll = totals.get('nll', totals['loss'])  # 'nll' is the loss without added terms
      totals['perplexity'] = math.exp(min(nll, 50.0))  # exp(710) would overflow
    return totals


def make_loss_eval(placed: PlacedStage) -> HeldOut:
  """Makes the evaluation of a stage's held-out documents."""
  config, algorithm, held_out = placed.config, placed.algorithm, placed.data.held_out
  assert held_out is not None and held_out.documents is not None, 'see `assemble.make_evaluator`'
  documents = held_out.documents
  examples = [documents[n] for n in range(len(documents))]
  return HeldOut(
    batches=eval_batches(examples, placed.shape.rows, placed.shape.row_length, per=algorithm.mean_per(config)),
    program=score.make_evaluate(placed.model, placed.objectives['policy'], placed.train, placed.compute, placed.ledger),
    prepare=lambda batch, roles: algorithm.prepare(batch, roles, config),
  )


def eval_batches(
  examples: Sequence[Example | None], batch_size: int, row_length: int, per: str = 'token'
) -> list[Batch]:
  """Packs each example once, into a list of Batches [batch_size, row_length].

  The last batch is filled with empty rows. Weights are normalized over all batches together, so that sums over batches
  are means; `per` as in training. Longer examples are cut to `row_length`, and left out if only their prompt remains.
  """
  documents = [example for example in examples if example is not None]
  cut = [c for document in documents if (c := document.cut(row_length)) is not None]
  if not any(e.trained.any() for e in cut):
    raise InputError(
      f'evaluation: none of the {len(documents)} documents has a trained token within {row_length} tokens'
    )
  rows = packing.pack_examples(cut, row_length)
  num_rows = math.ceil(len(rows) / batch_size) * batch_size
  whole = packing.to_batch([[cut[i] for i in row] for row in rows], row_length, num_rows, per=per)
  return [jax.tree.map(lambda x, n=n: x[n : n + batch_size], whole) for n in range(0, num_rows, batch_size)]


def pass_at_k(passed: np.ndarray, k: int) -> float:
  """Returns the unbiased estimate of the chance that at least one of k samples passes, from `passed` [N, n] bool.

  It is the mean over prompts of 1 - C(n - c, k) / C(n, k), where c of n samples pass (arXiv:2107.03374, eq. 1).
  """
  n = passed.shape[1]
  chances = [1 - math.comb(n - int(c), k) / math.comb(n, k) for c in passed.sum(axis=1)]
  return float(np.mean(chances))


def pass_rates(passed: np.ndarray) -> dict[str, float]:
  """Returns {'pass@k': chance} for k = 1, 2, 4, ... and n, from [N, n] bool."""
  n = passed.shape[1]
  ks = sorted({2**i for i in range(n.bit_length())} | {n})
  return {f'pass@{k}': pass_at_k(passed, k) for k in ks}


def pass_metrics(graded: Sequence[Graded], verdicts: np.ndarray, pass_reward: float) -> dict[str, float]:
  """Returns pass@k by the verdicts, and pass@k/NAME by each reward.

  Prompts with a sample that has no verdict are left out and counted. pass@k/NAME also leaves out prompts that the
  reward NAME does not apply to. If a reward model is the only reward, both need an `eval.pass_reward`.

  Args:
    graded: results of N prompts.
    verdicts: [N, n] values of the reward that decides which samples are correct; NaN: no verdict.
    pass_reward: a sample passes from this value of a reward on.
  """
  from jaxpost.rl.reward_metrics import has_threshold, reward_table  # not imported by SFT runs

  has_verdicts = np.isfinite(verdicts).all(axis=1)  # [N]
  values = {'': verdicts} | {f'/{name}': reward_table(graded, name) for name in graded[0].components}
  out: dict[str, float] = {'ungraded_prompts': int((~has_verdicts).sum())}
  for suffix, rewards in values.items():  # rewards [N, n]
    applies = has_verdicts & np.isfinite(rewards).all(axis=1)
    if applies.any() and has_threshold(graded[0].components, pass_reward):
      rates = pass_rates(rewards[applies] >= pass_reward)
      out |= {f'{name}{suffix}': chance for name, chance in rates.items()}
  return out


@dataclasses.dataclass
class SampledEval:
  """Evaluates pass@k of completions of held-out prompts, graded as in training.

  The reward `config.rl.correct_by` decides which samples pass, see `pass_metrics`.

  samples: n, completions per prompt.
  score: (rollout, roles) -> [N n, C] values of the reward model for C tokens, if there is one.
  offload: `config.rollout.offload`, as in training.
  """

  sampler: Sampler
  grader: Grader
  prompts: tuple[Prompt, ...]
  samples: int
  pass_reward: float
  temperature: float
  score: Callable[[Rollout, Roles], np.ndarray] | None = None
  offload: bool = False

  def __call__(self, roles: Roles, step: int) -> tuple[dict, list[dict]]:
    from jaxpost.rl import reward_metrics

    engine = self.sampler.engine
    with contextlib.ExitStack() as stack:
      stack.enter_context(engine.preserve_weights())  # the next rollout may need the weights that are loaded now
      if self.offload:
        from jaxpost.rl import offload

        stack.enter_context(offload.offloaded(roles))
      engine.load(roles.policy.params, step)
      rollout = self.sampler(self.prompts, self.samples, step, temperature=self.temperature)
      engine.unload()
    pending = self.grader.submit(rollout)
    graded = pending.result(self.score(rollout, roles) if self.score else None)
    out = {
      'completions/mean_length': float(rollout.lengths.mean()),
      'completions/clipped_ratio': float(1 - rollout.finished.mean()),
      **pass_metrics(graded.results, graded.verdicts, self.pass_reward),
      **reward_metrics.component_metrics(graded.results),
    }
    has_verdicts = np.isfinite(graded.verdicts).all(axis=1)
    if has_verdicts.any():
      out['reward'] = float(graded.rewards.reshape(-1, self.samples)[has_verdicts].mean())
    return out, graded.sample_rows()


def check_keep_best(config: Config, algorithm: Algorithm) -> None:
  """Raises InputError, before any stage trains, if no evaluation of the stage can have `config.save.keep_best`.

  The metrics of the loss of an algorithm of the user are known once it is evaluated (`Checkpointer.check_metrics`).
  """
  name, has_loss = config.save.keep_best, bool(algorithm.render and not algorithm.on_policy)
  refuse(
    not (config.eval.data.path and (config.eval.samples or not algorithm.on_policy)),
    'config.save.keep_best: nothing is evaluated; set config.eval.data.path, and on-policy config.eval.samples, too',
  )
  names = metrics_of_samples(config) if config.eval.samples else set()
  if has_loss and config.algorithm in ALGORITHMS:
    names |= metrics_of_loss(config, algorithm)
  refuse(
    name not in names and not name.startswith('time/') and not (has_loss and config.algorithm not in ALGORITHMS),
    f'config.save.keep_best: an evaluation of {config.algorithm} has no metric {name!r}; it has '
    f'{", ".join(sorted(names))}',
  )


def metrics_of_samples(config: Config) -> set[str]:
  """Returns the names of the metrics of `SampledEval`; some are left out if no sample is graded."""
  from jaxpost.rewards import builtin
  from jaxpost.rl.reward_metrics import has_threshold

  rewards = [*builtin.short_names(config.rewards_tuple()), *(['environment'] if config.environment else [])]
  names = {'completions/mean_length', 'completions/clipped_ratio', 'ungraded_prompts', 'reward'}
  names |= {f'rewards/{reward}/{figure}' for reward in rewards for figure in ('mean', 'std')}
  suffixes = ['', *(f'/{reward}' for reward in rewards)] if has_threshold(rewards, config.eval.pass_reward) else []
  return names | {rate + suffix for rate in pass_rates(np.zeros((1, config.eval.samples))) for suffix in suffixes}


def metrics_of_loss(config: Config, algorithm: Algorithm) -> set[str]:
  """Returns the names of the metrics of `HeldOut`, without computing one of them."""
  objective = algorithm.objective(config)
  shape = (1, 4)  # one row; any number of tokens has the same metrics

  def metrics() -> dict:
    ints, floats = jnp.ones(shape, jnp.int32), jnp.zeros(shape)
    arrays = collections.defaultdict(lambda: floats, dict.fromkeys(objective.arrays, floats))  # also those of rows
    for computed in algorithm.precompute(config).values():
      arrays |= {name: jnp.zeros((*shape, *tail), dtype) for name, (tail, dtype) in computed.arrays.items()}
    batch = Batch(ints, ints, ints, floats, sequence_ids=ints, arrays=arrays)
    outputs = Outputs(**{field.name: floats for field in dataclasses.fields(Outputs)})
    return objective.fn(outputs, batch if objective.coupled else arrays)[1]

  names = {'loss', *jax.eval_shape(metrics)}
  return names | ({'perplexity'} if 'entropy' in names and 'rewards/chosen' not in names else set())
