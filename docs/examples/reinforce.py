"""REINFORCE with a running mean of the reward as the baseline.

python -m launch.train --config=configs/quickstart.py:short \
  --workdir=runs/reinforce --config.grpo.algorithm=docs/examples/reinforce.py
"""

import numpy as np

from jaxpost import Algorithm, Credit, Objective


def objective(config):
  """Policy gradient -A log p of each sampled token (Williams 1992)."""

  def loss(outputs, arrays):
    return -arrays['advantages'] * outputs.logprobs, {'entropy': outputs.entropy}

  return Objective(loss, reads=('entropy',), arrays=('advantages',), temperature=config.rollout.temperature)


def credit(experience, config):
  """Advantage = reward - baseline, on every token that the policy generated."""
  graded = np.isfinite(experience.rewards)  # NaN: the reward failed
  baseline = experience.memory.get('baseline', 0.0)
  advantages = np.where(graded, experience.rewards - baseline, 0)
  mask = experience.mask * graded[:, None]
  if graded.any():
    mean = float(experience.rewards[graded].mean())
    baseline += config.user.get('rate', 0.1) * (mean - baseline)
  return Credit(
    {'advantages': advantages[:, None] * mask}, mask, metrics={'baseline': baseline}, memory={'baseline': baseline}
  )  # saved with each checkpoint


ALGORITHM = Algorithm(objective, on_policy=True, credit=credit)
