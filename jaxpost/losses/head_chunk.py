"""The head on one chunk of tokens: logits, outputs, loss and gradients.

Legend: B rows, T tokens, C tokens of a chunk, D hidden size, V vocabulary, S sequences that are being sampled.

`head.py` loops over chunks, and has the functions for training and scoring; samplers call `logits`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.distributed.mesh import Layout, TiedWeight
from jaxpost.errors import refuse
from jaxpost.matmul import Compute, einsum
from jaxpost.types import MASKED_LOGIT, Divergence, Outputs, TokenLoss

# Hidden states [B, C, D'] of each teacher, and the head [V', D'] of each.
Teachers = tuple[list[jax.Array], list[jax.Array]]


class HeadConfig(NamedTuple):
  """Static configuration of a compiled head."""

  loss_fn: TokenLoss | None  # loss of a chunk, elementwise in tokens; None: only outputs are computed
  vocab_size: int  # number of rows of the head without padding
  temperature: float  # logits are divided by it
  compute: Compute
  layout: Layout
  reads: tuple[str, ...] = ('entropy',)  # fields of `Outputs` to compute besides `logprobs`
  learns: tuple[str, ...] = ('entropy',)  # the fields among `reads` through which the loss is differentiated
  divergence: Divergence | None = None  # computes `outputs.divergence`; None if no loss reads it
  form: tuple[float, float] = (1.0, 0.0)  # (divisor, soft cap) of the logits, see `logits`
  teacher_forms: tuple[tuple[float, float], ...] = ()  # `form` of each teacher


class HeadResult(NamedTuple):
  """The result of a pass over tokens; the gradients are None if they are not computed."""

  loss: jax.Array  # []
  metrics: dict[str, jax.Array]  # []
  outputs: Outputs  # [B, C] of a chunk, [B, T] of all
  d_hidden: jax.Array | None = None
  d_head: jax.Array | TiedWeight | None = None


def logits(hidden: jax.Array, head: jax.Array, form: tuple[float, float], dtype: str) -> jax.Array:
  """Computes the logits of hidden states, in the same way for training, scoring and sampling.

  Args:
    hidden: [B, T, D] or [S, D].
    head: [V, D].
    form: (divisor, c): x = hidden head^T / divisor, then c tanh(x / c) unless c is 0.
    dtype: type of the operands of the product.

  Returns:
    [B, T, V] or [S, V] float32, before the temperature.
  """
  spec = 'sd,vd->sv' if hidden.ndim == 2 else 'bcd,vd->bcv'
  x = einsum(spec, hidden, head, dtype)
  divisor, cap = form
  if divisor != 1:
    x = x / divisor
  return cap * jnp.tanh(x / cap) if cap else x


def masked_logits(config: HeadConfig, hidden: jax.Array, head: jax.Array, temperature: float | jax.Array) -> jax.Array:
  """Computes logits [B, C, V] divided by the temperature (a number, or [B, C, 1]), with padding of V masked."""
  x = logits(hidden, head, config.form, config.compute.dtype) / temperature
  if config.vocab_size < head.shape[0]:
    x = jnp.where(jnp.arange(head.shape[0]) < config.vocab_size, x, MASKED_LOGIT)
  return x


def _logits_slope(config: HeadConfig, logits: jax.Array, temperature: float | jax.Array) -> jax.Array | float:
  """Returns d logits / d (hidden head^T), for logits divided by the temperature."""
  divisor, cap = config.form
  slope = 1 / (divisor * temperature)
  if not cap:
    return slope
  # The derivative is 1 - tanh^2. The clip is for padding, whose logits are -1e30.
  tanh = jnp.clip(logits * (temperature / cap), -1, 1)
  return slope * (1 - tanh * tanh)


def chunk_length(rows: int, length: int, vocab: int, elements: int) -> int:
  """Returns the number of tokens of a row in a chunk, so that a chunk has at most `elements` logits."""
  longest = max(1, min(length, elements // (rows * vocab)))
  num_chunks = -(-length // longest)
  return -(-length // num_chunks)  # chunks of equal length


class _Softmax(NamedTuple):
  """The softmax of a chunk: logits, exp(logits - max), its sum, log-sum-exp."""

  logits: jax.Array  # [B, C, V]
  exp: jax.Array  # [B, C, V]
  norm: jax.Array  # [B, C, 1]
  lse: jax.Array  # [B, C, 1]
  is_label: jax.Array  # [B, C, V] bool
  is_real: jax.Array  # [V] bool, False for padding


def chunk_loss(
  config: HeadConfig,
  hidden: jax.Array,
  head: jax.Array,
  labels: jax.Array,
  weights: jax.Array,
  arrays: dict[str, jax.Array],
  teachers: Teachers,
  gradients: bool,
) -> HeadResult:
  """Computes loss, outputs and, with `gradients`, gradients of one chunk of hidden states [B, C, D].

  Args:
    labels, weights: [B, C].
    arrays: {name: [B, C, ...]}; 'allowed' restricts the softmax, 'temperature' above 0 overrides `config.temperature`.
  """
  dtype, temperature = config.compute.dtype, config.temperature
  if 'temperature' in arrays:
    per_token = arrays['temperature']
    temperature = jnp.where(per_token > 0, per_token, config.temperature)[..., None]
  softmax = _softmax(masked_logits(config, hidden, head, temperature), labels, config.vocab_size, arrays.get('allowed'))
  fields = _unmasked_outputs(config, softmax)
  divergence_vjp = None
  if divergence := config.divergence:
    targets = _teacher_logits(config, teachers, head.shape[0], temperature)
    fields['divergence'], divergence_vjp = jax.vjp(lambda x: divergence(x, targets, arrays), softmax.logits)
  outputs = Outputs(**{k: jnp.where(weights != 0, v, 0) for k, v in fields.items()})
  if (loss_fn := config.loss_fn) is None:
    return HeadResult(jnp.zeros(()), {}, outputs)

  def weighted_sums(outputs: Outputs) -> tuple[jax.Array, dict]:
    loss, metrics = loss_fn(outputs, arrays)
    expected = f'must have {weights.shape}: a value per token, which is not summed yet'
    refuse(jnp.shape(loss) != weights.shape, f'the loss of an objective has the shape {jnp.shape(loss)}, {expected}')
    return jnp.sum(weights * loss), {k: jnp.sum(weights * v) for k, v in metrics.items()}

  if not gradients:
    return HeadResult(*weighted_sums(outputs), outputs)
  (loss, metrics), slopes = jax.value_and_grad(weighted_sums, has_aux=True)(outputs)
  d_logits = _logits_gradient(config, softmax, fields, slopes)
  if divergence_vjp:
    d_logits += divergence_vjp(jnp.where(weights != 0, slopes.divergence, 0))[0]
  d_logits = d_logits * _logits_slope(config, softmax.logits, temperature)
  d_hidden = einsum('bcv,vd->bcd', d_logits, head, dtype, hidden.dtype.name)
  d_head = einsum('bcd,bcv->dv' if transposes_gradient(config) else 'bcd,bcv->vd', hidden, d_logits, dtype)
  return HeadResult(loss, metrics, outputs, d_hidden, d_head)


def transposes_gradient(config: HeadConfig) -> bool:
  """Returns whether d head of a chunk is [D, V] instead of [V, D]: XLA:CPU computes it without a copy of d logits."""
  return config.compute.platform == 'cpu'


def _teacher_logits(config, teachers: Teachers, vocab: int, temperature) -> list[jax.Array]:
  """Returns the logits [B, C, vocab] of each teacher, which may have fewer tokens: the others are masked."""
  padded = []
  for form, hidden, head in zip(config.teacher_forms or ((1.0, 0.0),) * len(teachers[0]), *teachers):
    x = masked_logits(config._replace(form=form), hidden, head, temperature)
    padded.append(jnp.pad(x, ((0, 0), (0, 0), (0, vocab - x.shape[-1])), constant_values=MASKED_LOGIT))
  return padded


def _softmax(logits: jax.Array, labels: jax.Array, vocab_size: int, allowed: jax.Array | None) -> _Softmax:
  if allowed is not None:
    from jaxpost.losses import sampling_mask

    logits = sampling_mask.restrict(logits, allowed, labels)
  top = jnp.max(logits, axis=-1, keepdims=True)
  exp = jnp.exp(logits - top)
  norm = jnp.sum(exp, axis=-1, keepdims=True)
  lse = top + jnp.log(norm)
  # A comparison, not a gather: it stays local when V is sharded.
  is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
  is_real = jnp.arange(logits.shape[-1]) < vocab_size
  return _Softmax(logits, exp, norm, lse, is_label, is_real=is_real)


def _unmasked_outputs(config: HeadConfig, softmax: _Softmax) -> dict[str, jax.Array]:
  """Computes the fields of `Outputs` [B, C] that `config` reads, at all positions."""
  logits, exp, norm, lse, is_label, is_real = softmax
  fields = {'logprobs': jnp.sum(jnp.where(is_label, logits, 0), axis=-1) - lse[..., 0]}
  if 'entropy' in config.reads:
    entropy = lse - jnp.sum(exp * logits, axis=-1, keepdims=True) / norm
    fields['entropy'] = entropy[..., 0]
  if 'lse' in config.reads:
    fields['lse'] = lse[..., 0]
  if 'collision' in config.reads:
    fields['collision'] = (jnp.log(jnp.sum(exp * exp, axis=-1, keepdims=True)) - 2 * jnp.log(norm))[..., 0]
  if 'mean_logprob' in config.reads:
    fields['mean_logprob'] = jnp.sum(jnp.where(is_real, logits, 0), axis=-1) / config.vocab_size - lse[..., 0]
  return fields


def _logits_gradient(config: HeadConfig, softmax: _Softmax, fields: dict, slopes: Outputs) -> jax.Array:
  """Returns the gradient [B, C, V] of the logits, without that of the divergence, from those of the outputs.

  With p the softmax: d logprob = onehot - p, d entropy = -p (log p + entropy), d lse = p, d mean_logprob = 1 / V - p.

  Args:
    fields: see `_unmasked_outputs`; slopes: d loss / d outputs, each field [B, C].
  """
  logits, exp, norm, lse, is_label, is_real = softmax

  def slope(name):
    return vars(slopes)[name][..., None]

  probs = exp / norm
  d_logits = slope('logprobs') * (is_label - probs)
  if 'entropy' in config.learns:
    d_logits -= slope('entropy') * probs * (logits - lse + fields['entropy'][..., None])
  if 'lse' in config.learns:
    d_logits += slope('lse') * probs
  if 'mean_logprob' in config.learns:
    d_logits += slope('mean_logprob') * (is_real / config.vocab_size - probs)
  return d_logits
