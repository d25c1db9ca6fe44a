"""Adapters to google-jetstream 0.2.2: `JetStreamEngine` makes a JetStream engine of `NativeEngine`,
`JetStreamRollout` samples rollouts from any JetStream engine. Needs the extra [jetstream].

Legend: S slots, N sequences, C completion tokens.

Only the documented methods of its engines are used, as its orchestrator does not run on
current JAX. They return no log-probs and take no settings per request, so log-probs
are computed again, and temperature, top-k and top-p are those that the engine was made with.
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost.distributed.mesh import Layout
from jaxpost.errors import InputError
from jaxpost.rollout.buckets import bucket
from jaxpost.rollout.native import NativeEngine
from jaxpost.rollout.sequence import ActiveSequence, Request
from jaxpost.types import Prompt, Rollout


def check() -> None:
  """Raises InputError unless google-jetstream is installed."""
  try:
    importlib.metadata.distribution('google-jetstream')
  except importlib.metadata.PackageNotFoundError as error:
    spec = importlib.util.find_spec('jetstream')
    hint = f'; the jetstream of {spec.origin} is another project: pip uninstall jetstream' if spec else ''
    raise InputError(f"jetstream: google-jetstream is not installed; pip install -e '.[jetstream]'{hint}") from error


check()

from jetstream.engine import engine_api, tokenizer_pb2  # noqa: E402


class JetStreamEngine(engine_api.Engine):
  """`NativeEngine` with a block of one token, for JetStream's own loops."""

  def __init__(self, native: NativeEngine, run_key, tokenizer_path=''):
    """Makes the engine.

    Args:
      run_key: key data, [2] uint32, of all draws; the n-th insert draws as prompt n.
      tokenizer_path: the path that `get_tokenizer` returns.
    """
    if native.block != 1:
      raise InputError(f'jetstream: a block of {native.block} tokens; its engines make one, set config.rollout.block=1')
    self._native = native
    self._key = run_key
    self._path = tokenizer_path
    self._number = 0

  def load_params(self, params: Any, version: int = 0) -> Any:
    """Loads the trainer's parameters; returns the weights of the sampler."""
    self._native.load(params, version)
    return self._native.weights

  def _check(self, params):
    if params is not self._native.weights:
      raise InputError('jetstream: params are not those that load_params returned last; its weights are held once')

  def prefill(
    self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
  ) -> tuple[Any, engine_api.ResultTokens]:
    if existing_prefix is not None:
      raise NotImplementedError('a prompt is prefilled whole, so existing_prefix must be None')
    self._check(params)
    text = np.asarray(padded_tokens, np.int32).reshape(-1)[:true_length]
    return self._native.prefill([text]), text

  def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
    cache, text = prefix
    number, self._number = self._number, self._number + 1
    max_tokens = self._native.config.max_new_tokens
    entry = self._native.entry({slot: ActiveSequence(Request(text, number), max_tokens, text)}, {slot: 0})
    return self._native.insert(decode_state, cache, entry, self._key, 0)

  def generate(self, params: Any, decode_state: Any) -> tuple[Any, engine_api.ResultTokens]:
    self._check(params)
    state, block = self._native.generate(decode_state)
    data = jnp.stack([block.tokens[0], block.drawn[0].astype(jnp.int32), state.counts], axis=1)
    return state, engine_api.ResultTokens(data, (0, 1), (1, 2), (2, 3), 1)

  def init_decode_state(self) -> Any:
    return self._native.init_decode_state()

  def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
    return self._native.layout.sharding()

  def get_tokenizer(self) -> Any:
    return tokenizer_pb2.TokenizerParameters(path=self._path, extra_ids=0)

  @property
  def max_concurrent_decodes(self) -> int:
    return self._native.max_concurrent_decodes

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    return self._native.config.max_prompt

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self._native.layout.mesh

  @property
  def colocated_cpus(self) -> None:
    return None


def drive(
  engine: engine_api.Engine,
  params: Any,
  texts: Sequence[np.ndarray],
  samples: int,
  max_new_tokens: int,
  stop_ids: Sequence[int],
) -> list[list[int]]:
  """Completes texts with any JetStream engine, by its documented methods only.

  Returns:
    The tokens of `samples` completions of each text, in the order of the texts.
  """
  max_length = max(map(len, texts))
  if max_length > engine.max_prefill_length:
    raise InputError(f'jetstream: a prompt has {max_length} tokens, and its engine takes {engine.max_prefill_length}')
  state = engine.init_decode_state()
  out: list[list[int]] = [[] for _ in range(len(texts) * samples)]
  waiting = list(reversed(range(len(out))))  # numbers of the completions that have not begun; the next one is the last
  running: dict[int, int] = {}  # slot -> number of the completion
  prefilled = prefix = None  # the index of the text that was prefilled last, and what `prefill` returned
  while waiting or running:
    for slot in range(engine.max_concurrent_decodes):
      if slot in running or not waiting:
        continue
      n = waiting.pop()
      text = texts[n // samples]
      if prefilled != n // samples:
        size = bucket(len(text), engine.max_prefill_length)
        padded = jnp.asarray(np.pad(text, (0, size - len(text))))
        prefix = engine.prefill(params=params, padded_tokens=padded, true_length=len(text))
        prefilled = n // samples
      state = engine.insert(prefix, state, slot=slot)
      running[slot] = n
    state, result = engine.generate(params, state)
    result = result.convert_to_numpy()
    for slot, n in list(running.items()):
      data = result.get_result_at_slot(slot)
      out[n] += data.tokens[0][data.valid[0] > 0].tolist()
      stop = next((i for i, t in enumerate(out[n]) if t in stop_ids), None)
      if stop is not None or len(out[n]) >= max_new_tokens:
        out[n] = out[n][: max_new_tokens if stop is None else stop + 1]
        del running[slot]
  return out


class JetStreamRollout:
  """A JetStream engine as a rollout engine, in place of `NativeEngine`.

  Args:
    max_new_tokens: tokens of a completion at most; stop_ids: end it earlier.
    rescore: Rollout -> [N, C] log-probs of its tokens by the policy.
    params: the trainer's parameters -> the engine's weights; None: the engine's
      `load_params()`, which ignores the trainer's.
  """

  def __init__(
    self,
    engine: engine_api.Engine,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    rescore: Callable,
    params: Callable | None = None,
  ):
    self.engine = engine
    self.rescore = rescore
    self.max_new_tokens = max_new_tokens
    self.stop_ids = tuple(stop_ids)
    self._make_weights = params or (lambda params: engine.load_params())
    self.max_concurrent_decodes = engine.max_concurrent_decodes
    self.weights, self.version = None, 0
    self.layout = Layout(engine.mesh, 'rollout')

  def load(self, params: Any, version: int) -> dict:
    self.weights, self.version = self._make_weights(params), version
    return {'bytes': 0}

  def unload(self) -> None:
    self.weights = None

  @contextlib.contextmanager
  def preserve_weights(self) -> Iterator[None]:
    """Restores the current weights and version when the block ends."""
    weights = self.weights
    version = self.version
    yield
    self.weights = weights
    self.version = version

  def described(self, params: Any) -> tuple:
    del params  # the engine holds weights and caches of its own
    return ()

  def jobs(self, params: Any, lengths: Sequence[int], group_size: int, turns: bool = False) -> list:
    del params, lengths, group_size, turns
    return []

  def __call__(
    self,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    run_key,
    step: int,
    sampling: dict | None = None,
    on_dispatch: Callable[[int], None] | None = None,
  ) -> Rollout:
    """Samples `group_size` completions of each prompt."""
    del run_key  # the engine has its own random numbers
    if on_dispatch:
      raise InputError('config.rollout.inflight_update_blocks: jetstream takes no weights while it samples; leave it 0')
    if sampling:
      raise InputError(
        f'jetstream: its engines take no {", ".join(sampling)} per call; set it where the engine is made'
      )
    ids = drive(
      self.engine, self.weights, [p.tokens for p in prompts], group_size, self.max_new_tokens, stop_ids=self.stop_ids
    )
    tokens = np.array([x + [0] * (self.max_new_tokens - len(x)) for x in ids], np.int32)
    empty = np.zeros(tokens.shape, np.float32)
    rollout = Rollout(
      tuple(prompts),
      tokens,
      np.array([len(x) for x in ids], np.int32),
      empty,
      empty,
      finished=np.array([x[-1] in self.stop_ids for x in ids]),
      step=step,
      version=self.version,
    )
    logprobs = np.asarray(self.rescore(rollout), np.float32)
    return rollout.replace(logprobs=logprobs, behavior_logprobs=logprobs)
