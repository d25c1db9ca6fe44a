"""Distillation from teachers whose tokenizers are not the student's: `distill.align=text`.

Each tokenizes the same text, and `data.text_alignment` splits it into spans. For a span of one token of each, the loss
compares next-token distributions over the tokens that both have, and one event for all others. For a longer span it
compares the probability of the text, the product of the conditional probabilities of its tokens, as one event (ALM,
"approximate likelihood matching", arXiv:2503.20083, eq. 8). Both are lower bounds of the divergence of the two
distributions of texts. ULD (arXiv:2402.12030) and GOLD (Hugging Face 2025) match sorted probabilities of the others.

Legend: B rows, T tokens, k number of the teacher's most probable tokens that are kept.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.algorithms.base import Config
from jaxpost.errors import refuse
from jaxpost.losses import divergences
from jaxpost.types import Batch, Objective, Outputs

# `teacher_N_kind` of a token: in no span; a span of one token of each; the first of a longer span; its other tokens.
NONE, PAIR, FIRST, FURTHER = range(4)


def names(teacher: int) -> tuple[str, str, str, str]:
  """Names in `Batch.arrays`: 1 + ids and log-probs [B, T, k] at pairs, kind and log-prob of the span [B, T]."""
  prefix = f'teacher_{teacher}_'
  return prefix + 'ids', prefix + 'logprobs', prefix + 'kind', prefix + 'span'


def objective(config: Config, shares: Sequence[float]) -> Objective:
  """Returns the loss: divergences of all spans / tokens of the student, and nll_coef * cross entropy.

  Args:
    shares: weights of the teachers, which sum to 1.
  """
  options = config.distill

  def pair_divergence(logits, teachers, arrays):
    del teachers
    total = 0
    for i, share in enumerate(shares):
      ids, logprobs, kind, _ = (arrays[name] for name in names(i))
      total += share * jnp.where(kind == PAIR, divergences.partial_jsd(logits, ids, logprobs, options.beta), 0)
    return total

  def loss(outputs: Outputs, batch: Batch):
    divergence, aligned = outputs.divergence, 0
    for i, share in enumerate(shares):
      *_, kind, span = (batch.arrays[name] for name in names(i))
      divergence += share * of_spans(outputs.logprobs, kind, span, options.beta)
      aligned += share * (kind != NONE)
    metrics = {'divergence': divergence, 'nll': -outputs.logprobs, 'entropy': outputs.entropy, 'aligned': aligned}

    def total(x):
      return jnp.sum(batch.loss_weights * x)

    return total(divergence - options.nll_coef * outputs.logprobs), jax.tree.map(total, metrics)

  return Objective(
    loss, coupled=True, token_means=True, reads=('entropy',), learns=('divergence',), divergence=pair_divergence
  )


def of_spans(logprobs: jax.Array, kind: jax.Array, span: jax.Array, beta: float) -> jax.Array:
  """Returns the divergence of the text of each longer span, at its first token; 0 elsewhere.

  Args:
    logprobs: [B, T] of the student's tokens.
    kind: [B, T] int.
    span: [B, T] the teacher's log-prob of the text, at the first token.

  Returns:
    [B, T] float32.
  """
  is_first = kind == FIRST
  span_number = jnp.where(kind >= FIRST, jnp.cumsum(is_first, axis=1), 0)  # of the span in its row, from 1
  parts = jnp.where(kind >= FIRST, logprobs, 0)
  sums = jax.vmap(lambda x, n: jax.ops.segment_sum(x, n, x.shape[0] + 1))(parts, span_number)
  text_logprob = jnp.take_along_axis(sums, span_number, axis=1)
  # The inner `where` keeps gradients finite where there is no span.
  divergence = divergences.event_jsd(jnp.where(is_first, text_logprob, -1.0), jnp.where(is_first, span, -1.0), beta)
  return jnp.where(is_first, divergence, 0)


def check(config: Config) -> None:
  """Raises InputError for fields that do not go with text."""
  options = config.distill
  refuse(
    not options.top_k,
    'config.distill.top_k: with distill.align=text the teacher runs before the first step, so its most probable tokens '
    'are kept; set how many, such as 64',
  )
  refuse(
    options.temperature != 1,
    'config.distill.temperature: probabilities of texts have none; with distill.align=text leave it 1',
  )


def check_samples(config: Config) -> None:
  """Raises InputError for fields of opd that do not go with text."""
  rl = config.rl
  refuse(
    not config.distill.teachers,
    'config.distill.align: text needs config.distill.teachers; name the teacher there, and leave rl.reference empty',
  )
  refuse(
    bool(config.environment or config.router.routing_replay or rl.sampling_mask),
    'config.distill.align: text goes with neither an environment nor router.routing_replay or rl.sampling_mask, which '
    "record the student's tokens",
  )
  refuse(
    rl.kl_in == 'loss',
    "config.rl.kl_in: loss compares tokens, and distill.align=text compares texts; leave it 'advantage'",
  )
  refuse(
    config.rollout.temperature != 1,
    'config.rollout.temperature: probabilities of texts have none; with distill.align=text leave it 1',
  )
  refuse(
    any('temperature=' in entry for entry in rl.sources),
    'config.rl.sources: probabilities of texts have no temperature; with distill.align=text leave it out',
  )


def check_teacher(key: str, source: Any, top_k: int) -> None:
  """Raises InputError, which begins with `key`, for a source of weights without a tokenizer, or with no token head."""
  refuse(bool(source.config.num_labels), f'{key} is a reward model, which predicts no tokens; name a language model')
  refuse(
    bool(source.stage), f'{key} is a stage of this run, which has the tokens of the student; set distill.align=tokens'
  )
  size = source.config.vocab_size
  refuse(top_k > size, f'config.distill.top_k: {top_k} of {size} tokens of {key.partition(": ")[2]}; lower it')
  has_tokenizer = source.checkpoints is not None or source.folder and (source.folder / 'tokenizer.json').exists()
  refuse(not has_tokenizer, f'{key} has no tokenizer of its own (tokenizer.json), which distill.align=text needs')
