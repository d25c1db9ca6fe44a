"""Supervised fine-tuning: cross entropy on packed rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpost.algorithms.base import Algorithm
from jaxpost.data import chat
from jaxpost.types import Objective


def objective(config) -> Objective:
  """Returns the cross entropy of trained tokens, with the options of `config.nll`.

  Label smoothing: Szegedy et al. 2016 (arXiv:1512.00567), section 7; z-loss:
  PaLM (arXiv:2204.02311), section 5; DFT: arXiv:2508.05629, eq. 9.
  """
  o = config.nll

  def cross_entropy(outputs, arrays):
    del arrays
    logp = outputs.logprobs
    loss, metrics = -logp, {'entropy': outputs.entropy}
    if o.kind == 'dft':
      loss = -jax.lax.stop_gradient(jnp.exp(logp)) * logp
    if o.label_smoothing:
      loss = (1 - o.label_smoothing) * loss - o.label_smoothing * outputs.mean_logprob
    if o.z_loss:
      metrics['z_loss'] = outputs.lse**2
      loss += o.z_loss * metrics['z_loss']
    return loss, metrics

  learns = [name for name, used in (('mean_logprob', o.label_smoothing), ('lse', o.z_loss)) if used]
  return Objective(
    cross_entropy, reads=('entropy', *learns), learns=tuple(learns), neftune_alpha=o.neftune_alpha, seed=config.seed
  )


def render_text(rows, tokenizer, config) -> Callable:
  """Returns a function of a row number: the Example of a document."""
  return lambda n: chat.make_example(tokenizer, rows[n], rows.where(n), train_on=config.data.train_on)


SFT = ALGORITHM = Algorithm(objective, render=render_text)
