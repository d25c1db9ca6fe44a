"""Supervised fine-tuning: a stream of packed rows and cross entropy."""

from jaxpost.programs.train import Objective

ON_POLICY = False


def cross_entropy(outputs, arrays):
  """-log p of each trained token; their mean over the batch is the loss."""
  del arrays
  return -outputs.logprobs, {'entropy': outputs.entropy}


def make_objective(config) -> Objective:
  del config
  return Objective(cross_entropy, entropy=True, entropy_grad=False)


def check_first_step(metrics, config):
  """Nothing about the first loss is known in advance."""
  del metrics, config
