"""The gated delta rule and its convolution against plain recurrences in float64.

Legend: B rows, T tokens, K heads of queries and keys, H value heads, d size of keys, e size of values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost.models import delta_rule

NAMES = ('q', 'k', 'v', 'log_decay', 'beta')


def random_inputs(rows=2, length=150, heads=2, groups=3, size=10, width=6, seed=0):
  """Inputs whose decays are anywhere between none at all and everything."""
  r = np.random.RandomState(seed)
  q, k = (r.standard_normal((rows, length, heads, size)) for _ in range(2))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = r.standard_normal((rows, length, heads * groups, width))
  log_decay = -np.exp(3 * r.standard_normal((rows, length, heads * groups)) - 2)
  beta = 1 / (1 + np.exp(-2 * r.standard_normal((rows, length, heads * groups))))
  return dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta)


def starts(length, *at):
  runs = np.zeros(length, np.int32)
  runs[list(at)] = 1
  return np.cumsum(runs)


RUNS = np.stack([starts(150, 3, 64, 70, 71, 128), starts(150, 90)])


def recurrence(x, runs, g=None, state=None, g_state=0.0):
  """Token by token, in float64: (out, last state), or the gradients of sum(g out) + sum(g_state state)."""
  groups = x['v'].shape[2] // x['k'].shape[2]
  q, k = (np.repeat(x[n], groups, axis=2).swapaxes(0, 1) for n in 'qk')
  v, decay, beta = (x[n].swapaxes(0, 1) for n in ('v', 'log_decay', 'beta'))
  new = np.diff(runs.T, axis=0, prepend=0) > 0  # [T, B]
  s = np.zeros((*v.shape[1:3], k.shape[-1], v.shape[-1])) if state is None else state
  trace, out = [], []
  for t in range(len(v)):
    a = np.exp(decay[t])[..., None, None] * np.where(new[t][:, None, None, None], 0, s)
    error = v[t] - np.einsum('bhd,bhde->bhe', k[t], a)
    s = a + np.einsum('bhd,bhe->bhde', k[t], beta[t][..., None] * error)
    trace.append((a, error, s))
    out.append(np.einsum('bhd,bhde->bhe', q[t], s))
  if g is None:
    return np.stack(out, 1), s
  g = g.swapaxes(0, 1)
  grads = {name: [] for name in NAMES}
  ds = np.zeros_like(s) + g_state
  for t in reversed(range(len(v))):
    a, error, s = trace[t]
    ds = ds + q[t][..., None] * g[t][..., None, :]
    de = np.einsum('bhd,bhde->bhe', k[t], ds)
    da = ds - np.einsum('bhd,bhe->bhde', k[t], beta[t][..., None] * de)
    dk = np.einsum('bhde,bhe->bhd', ds, beta[t][..., None] * error)
    dk -= np.einsum('bhde,bhe->bhd', a, beta[t][..., None] * de)
    grads['q'].append(np.einsum('bhde,bhe->bhd', s, g[t]))
    grads['k'].append(dk)
    grads['v'].append(beta[t][..., None] * de)
    grads['beta'].append(np.sum(de * error, -1))
    grads['log_decay'].append(np.sum(da * a, (-2, -1)))
    ds = np.exp(decay[t])[..., None, None] * np.where(new[t][:, None, None, None], 0, da)
  grads = {name: np.stack(y[::-1], 1) for name, y in grads.items()}
  for name in 'qk':
    y = grads[name]
    grads[name] = y.reshape(*y.shape[:2], -1, groups, y.shape[-1]).sum(3)
  return grads | {'state': ds}


def largest_error(ours, right):
  return np.max(np.abs(np.asarray(ours) - right)) / np.max(np.abs(right))


def run(x, runs, state=None, **more):
  x = {name: jnp.asarray(y, jnp.float32) for name, y in x.items()}
  chunked = jax.jit(functools.partial(delta_rule.chunked, dtype='float32', **more))
  return chunked(**x, runs=jnp.asarray(runs), state=state)


@pytest.mark.parametrize('chunk', [16, 64])
def test_chunks_compute_the_recurrence(chunk):
  x = random_inputs()
  out, state = run(x, RUNS, chunk=chunk)
  right, last = recurrence(x, RUNS)
  assert largest_error(out, right) < 2e-6
  assert largest_error(state, last) < 2e-6


def test_a_state_is_continued_by_the_first_run_only():
  x = random_inputs(seed=1)
  first = np.random.RandomState(2).standard_normal((2, 6, 10, 6))
  out, state = run(x, RUNS, state=jnp.asarray(first, jnp.float32))
  right, last = recurrence(x, RUNS, state=first)
  assert largest_error(out, right) < 2e-6 and largest_error(state, last) < 2e-6
  plain = run(x, RUNS)[0]
  assert largest_error(plain[0, 3:], right[0, 3:]) < 2e-6 < 1e-2 < largest_error(plain[0, :3], right[0, :3])


def test_gradients_are_those_of_the_recurrence():
  x = random_inputs(seed=3)
  r = np.random.RandomState(4)
  first, g_state = r.standard_normal((2, 2, 6, 10, 6))
  g = r.standard_normal((2, 150, 6, 6))
  right = recurrence(x, RUNS, g, first, g_state)

  def loss(x):
    out, state = delta_rule.chunked(**x, runs=jnp.asarray(RUNS), dtype='float32')
    return jnp.sum(out * g) + jnp.sum(state * g_state)

  found = jax.jit(jax.grad(loss))({name: jnp.asarray(y, jnp.float32) for name, y in (x | {'state': first}).items()})
  assert {name: largest_error(found[name], y) < 1e-5 for name, y in right.items()} == dict.fromkeys(right, True)


def test_like_keys_and_full_steps_stay_exact():
  """The triangular system of equal keys has powers that overflow float32."""
  x = random_inputs(seed=5)
  x['k'][:] = x['k'][:, :1]
  x['beta'][:] = 1
  x['log_decay'][:] = -1e-4
  assert largest_error(run(x, RUNS)[0], recurrence(x, RUNS)[0]) < 1e-5


def test_fast_decay_before_a_slow_one_keeps_its_bits():
  x = random_inputs(seed=6)
  x['log_decay'][:, ::2] = -500.0
  x['log_decay'][:, 32:64] = -1e-3
  assert largest_error(run(x, RUNS)[0], recurrence(x, RUNS)[0]) < 2e-6


def test_a_document_does_not_see_what_is_packed_beside_it():
  x = random_inputs(rows=1, seed=7)
  runs = RUNS[:1]
  whole = run(x, runs)[0]
  for n in range(runs.max() + 1):
    at = np.flatnonzero(runs[0] == n)
    alone = run({name: y[:, at] for name, y in x.items()}, np.zeros((1, len(at)), np.int32))[0]
    assert largest_error(whole[:, at], np.asarray(alone)) < 2e-6


def test_padding_leaves_the_state():
  x = random_inputs(seed=8)
  real = np.arange(150) < np.array([[70], [150]])
  for name in ('log_decay', 'beta'):
    x[name] = x[name] * real[..., None]
  short = {name: y[:1, :70] for name, y in x.items()}
  zeros = np.zeros((2, 150), np.int32)
  assert largest_error(run(x, zeros)[1][:1], recurrence(short, zeros[:1, :70])[1]) < 2e-6


def test_steps_are_the_recurrence():
  x = random_inputs(length=40, seed=9)
  zeros = np.zeros((2, 40), np.int32)
  state, outs = jnp.zeros((2, 6, 10, 6)), []
  step = jax.jit(delta_rule.step)
  for t in range(40):
    out, state = step(**{name: jnp.asarray(y[:, t], jnp.float32) for name, y in x.items()}, state=state)
    outs.append(out)
  right, last = recurrence(x, zeros)
  assert largest_error(jnp.stack(outs, 1), right) < 2e-6 and largest_error(state, last) < 2e-6


def test_no_array_has_two_dimensions_of_time_and_no_loop_a_step_per_token():
  x = {name: jnp.asarray(y, jnp.float32) for name, y in random_inputs(rows=1, length=1024).items()}
  runs = jnp.zeros((1, 1024), jnp.int32)
  jaxpr = jax.make_jaxpr(functools.partial(delta_rule.chunked, dtype='float32'))(**x, runs=runs)
  scans, most = [], 0

  def visit(jaxpr):
    nonlocal most
    for eqn in jaxpr.eqns:
      most = max([most, *(v.aval.size for v in eqn.outvars)])
      if eqn.primitive.name == 'scan':
        scans.append(eqn.params['length'])
      for inner in _inner(eqn):
        visit(inner)

  visit(jaxpr.jaxpr)
  assert scans == [1024 // delta_rule.CHUNK]
  assert most <= 1024 * delta_rule.CHUNK * 6


def _inner(eqn):
  for value in eqn.params.values():
    for x in value if isinstance(value, (tuple, list)) else (value,):
      if hasattr(x, 'eqns') or hasattr(getattr(x, 'jaxpr', None), 'eqns'):
        yield getattr(x, 'jaxpr', x)


def test_a_document_has_a_number_and_padding_that_of_the_one_before():
  segments = jnp.array([[1, 1, 2, 2, 2, 7, 0, 0], [0, 0, 1, 1, 0, 2, 2, 2]])
  runs = delta_rule.runs_of(segments)
  np.testing.assert_array_equal(runs, [[0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2]])


def test_the_convolution_stays_within_runs():
  r = np.random.RandomState(0)
  x, weight = r.standard_normal((2, 9, 2, 3)), r.standard_normal((2, 3, 4))
  tail = r.standard_normal((2, 2, 3, 3))
  runs = np.array([[0, 0, 1, 1, 1, 1, 2, 2, 2], [0] * 9])
  right = np.zeros_like(x)
  for b, t, back in np.ndindex(2, 9, 4):
    at = t - back
    if at >= 0 and runs[b, at] == runs[b, t]:
      right[b, t] += x[b, at] * weight[..., 3 - back]
    elif at < 0 and not runs[b, t]:
      right[b, t] += tail[b, :, at] * weight[..., 3 - back]
  out = delta_rule.convolve(*(jnp.asarray(y, jnp.float32) for y in (x, weight)), jnp.asarray(runs), jnp.asarray(tail))
  np.testing.assert_allclose(out, right, atol=1e-5)
