"""The controller of on-policy RL: which phase runs when, in what order.

Legend: N sequences, G samples a prompt, B rows, T tokens.

It alternates programs on the same devices and threads the records between
them: prompts -> rollout -> rewards -> reference log-probs -> advantages ->
batch. The loop consumes what it yields and does not know that it samples.
Every process runs it on the same values and takes the same decisions.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpost.data.prompts import PromptStream
from jaxpost.data.tokenizer import Tokenizer
from jaxpost.metrics import Chrono
from jaxpost.rewards.pool import Group, RewardPool
from jaxpost.roles import Policy, Reference, Sampler
from jaxpost.types import Batch, Rollout


@dataclasses.dataclass
class Experience:
  """One step's batch and where it comes from."""

  batch: Batch  # placed: [M, B / M, T]
  info: dict  # metrics of sampling and grading
  repeats: int  # updates to make with it
  step: int
  version: int  # updates behind the weights that sampled it
  samples: Callable  # () -> rows for samples/STAGE/STEP.jsonl


@dataclasses.dataclass
class Controller:
  """An iterator of `Experience`, resumable at each step.

  algorithm: the module that turns graded rollouts into batches.
  config: the stage's config, read by `algorithm` only.
  rows: (B, T) of a batch, fixed, so that nothing is compiled twice.
  """

  algorithm: object
  config: object
  policy: Policy
  sampler: Sampler
  reference: Reference | None
  pool: RewardPool
  prompts: PromptStream
  tokenizer: Tokenizer
  chrono: Chrono
  group_size: int
  rows: tuple[int, int]
  repeats: int = 1
  step: int = 0

  def __iter__(self):
    return self

  def __next__(self) -> Experience:
    prompts, info = next(self.prompts)
    version = self.step * self.repeats
    with self.chrono('reshard'):
      moved = self.sampler.sync(self.policy, version)
    with self.chrono('sample'):
      rollout = self.sampler(prompts, self.group_size, self.step)
      self.sampler.release()
    with self.chrono('pack'):
      groups = to_groups(rollout, self.tokenizer)
      grading = self.pool.submit(groups)  # runs while the devices score
    scores = self._scores(rollout)
    with self.chrono('reward'):
      graded = grading.result()
      rewards = agreed(np.array([[np.nan if r is None else r
                                  for r in g.rewards] for g in graded]))
    with self.chrono('pack'):
      values, metrics = self.algorithm.advantages(rewards, self.config)
      rows = self.algorithm.to_batch(
          rollout, values.reshape(-1), np.isfinite(rewards).reshape(-1),
          *self.rows)
      batch = self.policy.place(rows).replace(**scores)
    real = int((rows.segment_ids > 0).sum())
    info = {**info, 'tokens': real,
            'packing_efficiency': real / rows.tokens.size, **metrics,
            **component_metrics(graded), **length_metrics(rollout),
            **self.pool.stats, 'reshard_bytes': moved['bytes'],
            'slot_occupancy': rollout.occupancy}
    step, self.step = self.step, self.step + 1
    return Experience(
        batch, info, self.repeats, step, rollout.version,
        lambda: sample_rows(rollout, groups, graded))

  def _scores(self, rollout: Rollout) -> dict:
    """Log-probs that the objective compares with, left on the device."""
    scores = {}
    if self.reference is None and self.repeats == 1:
      return scores  # the old policy is the one being updated
    with self.chrono('pack'):
      batch = self.policy.place(self.algorithm.to_batch(
          rollout, *_unknown(rollout), *self.rows))
    with self.chrono('score'):
      if self.reference is not None:
        scores['ref_logprobs'] = self.reference(batch).logprobs
      if self.repeats > 1:
        scores['old_logprobs'] = self.policy.score(batch).logprobs
      return jax.block_until_ready(scores)

  def state(self) -> dict:
    return {'step': self.step, 'prompts': self.prompts.state()}

  def restore(self, state: dict):
    self.step = state['step']
    self.prompts.restore(state['prompts'])

  def close(self):
    self.pool.close()


def agreed(rewards: np.ndarray) -> np.ndarray:
  """What process 0 graded: a judge may answer each process differently."""
  if jax.process_count() == 1:
    return rewards
  return np.asarray(multihost_utils.broadcast_one_to_all(rewards))


def _unknown(rollout: Rollout):
  """Advantages not known yet; every sequence counts."""
  number = len(rollout.lengths)
  return np.zeros(number, np.float32), np.ones(number, bool)


def to_groups(rollout: Rollout, tokenizer: Tokenizer) -> list[Group]:
  """Completions as the reward functions of TRL take them."""
  size = len(rollout.lengths) // len(rollout.prompts)
  groups = []
  for i, prompt in enumerate(rollout.prompts):
    ids = [rollout.completions[n, :rollout.lengths[n]].tolist()
           for n in range(i * size, (i + 1) * size)]
    texts = [tokenizer.decode(x) for x in ids]
    if not isinstance(prompt.prompt, str):
      texts = [[{'role': 'assistant', 'content': t}] for t in texts]
    groups.append(Group(
        [prompt.prompt] * size, texts, ids,
        {k: [v] * size for k, v in prompt.columns.items()}))
  return groups


def component_metrics(graded) -> dict:
  """rewards/<fn>/mean and std over the samples it applied to."""
  out = {}
  for name in graded[0].components:
    values = [r for g in graded for r in g.components[name] if r is not None]
    if values:
      out[f'rewards/{name}/mean'] = float(np.mean(values))
      out[f'rewards/{name}/std'] = float(np.std(values))
  return out


def length_metrics(rollout: Rollout) -> dict:
  ended = rollout.lengths[rollout.finished]
  return {
      'completions/mean_length': float(rollout.lengths.mean()),
      'completions/min_length': int(rollout.lengths.min()),
      'completions/max_length': int(rollout.lengths.max()),
      'completions/clipped_ratio': float(1 - rollout.finished.mean()),
      'completions/mean_terminated_length':
          float(ended.mean()) if ended.size else 0.0,
      'completion_tokens': int(rollout.lengths.sum())}


def sample_rows(rollout: Rollout, groups, graded) -> list[dict]:
  """What a person wants to see of a step, one row a completion."""
  rows = []
  size = len(rollout.lengths) // len(rollout.prompts)
  for n, length in enumerate(rollout.lengths):
    group, result, i = groups[n // size], graded[n // size], n % size
    rows.append(dict(
        prompt=_text(group.prompts[i]), completion=_text(group.completions[i]),
        reward=result.rewards[i], **({'error': result.error} if result.error
                                     else {}),
        components={k: v[i] for k, v in result.components.items()},
        length=int(length), finished=bool(rollout.finished[n]),
        logprob=float(rollout.logprobs[n, :length].sum()),
        prompt_index=rollout.prompts[n // size].index, sample=i,
        version=rollout.version))
  return rows


def _text(prompt) -> str:
  if isinstance(prompt, str):
    return prompt
  return '\n'.join(str(m['content']) for m in prompt)
