"""Supervised fine-tuning: cross entropy on packed rows.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpost.algorithms.base import Algorithm, Config, learning_rate
from jaxpost.data import chat
from jaxpost.types import Objective

if TYPE_CHECKING:
  from jaxpost.data.examples import Example
  from jaxpost.data.sources import Rows
  from jaxpost.data.tokenizer import Tokenizer


def objective(config: Config) -> Objective:
  """Returns the cross entropy of trained tokens, with the options of `config.nll`.

  Label smoothing: Szegedy et al. 2016 (arXiv:1512.00567), section 7; z-loss:
  PaLM (arXiv:2204.02311), section 5; DFT: arXiv:2508.05629, eq. 9.
  """
  nll = config.nll

  def cross_entropy(outputs, arrays):
    del arrays
    logp = outputs.logprobs
    loss = -logp
    metrics = {'entropy': outputs.entropy, 'nll': loss}
    if nll.kind == 'dft':
      loss = -jax.lax.stop_gradient(jnp.exp(logp)) * logp
    if nll.label_smoothing:
      loss = (1 - nll.label_smoothing) * loss - nll.label_smoothing * outputs.mean_logprob
    if nll.z_loss:
      metrics['z_loss'] = outputs.lse**2
      loss += nll.z_loss * metrics['z_loss']
    return loss, metrics

  # The head computes only the outputs in `reads`, and gradients only of those in `learns`.
  learns = []
  if nll.label_smoothing:
    learns.append('mean_logprob')
  if nll.z_loss:
    learns.append('lse')
  options = dict(neftune_alpha=nll.neftune_alpha, mtp_weight=nll.mtp_weight)
  return Objective(cross_entropy, reads=('entropy', *learns), learns=tuple(learns), **options)


def render_text(rows: Rows, tokenizer: Tokenizer, config: Config) -> Callable[[int], Example]:
  """Returns a function of a row number: the Example of a document."""

  def document(n):
    return chat.make_example(tokenizer, rows[n], rows.where(n), train_on=config.data.train_on)

  return document


SFT = ALGORITHM = Algorithm(objective, {'optim': {'lr': learning_rate(2e-5)}}, sections=('nll',), render=render_text)
