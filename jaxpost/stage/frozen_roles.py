"""Makes the roles of a stage that are not trained: reference, reward model, teachers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpost.distributed import coordination, transfer
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.models.model import Model
from jaxpost.models.parameters import join
from jaxpost.programs import score, weight_files
from jaxpost.roles import Frozen, place
from jaxpost.stage import checks, load_weights, weight_sources

if TYPE_CHECKING:
  import numpy as np
  from etils import epath

  from jaxpost.algorithms.base import Precompute
  from jaxpost.distributed.mesh import Layout
  from jaxpost.models.config import ModelConfig
  from jaxpost.programs.compile import Ledger, Program
  from jaxpost.stage.place import PlacedStage
  from jaxpost.stage.precompute import Run
  from jaxpost.stage.records import Inputs, Source
  from jaxpost.types import Batch


def make_frozen_run(
  placed: PlacedStage, params: dict, workdir: epath.PathLike | None, name: str, spec: Precompute
) -> Run:
  """Returns a function from a host batch to the outputs of a frozen role; its first call loads the role's weights."""

  @functools.cache
  def role() -> Frozen:
    return make_frozen(placed, name, params, workdir)

  def run(batch: Batch) -> dict[str, np.ndarray]:
    placed_batch = place(placed.score, placed.shape.micro_rows, batch)
    outputs = transfer.to_host(spec.read(role()(placed_batch)))
    return {key: array.reshape(-1, *array.shape[2:]) for key, array in outputs.items()}  # micro-batches joined

  return run


def make_frozen(placed: PlacedStage, name: str, params: dict, workdir: epath.PathLike | None) -> Frozen:
  """Makes a role that is not trained; its weights are stored in the dtype in which matmuls read them."""
  config, ledger, dtype = placed.config, placed.ledger, placed.config.model.param_dtype
  source, layout = placed.inputs.sources[name], placed.score
  model, part = models_of(placed.inputs, name, layout == placed.train)
  shared: dict[str, Any] = {}  # frozen leaves of the policy, which the role reads without a copy
  if part is not model:
    params, shared = model_lib.split(params, placed.model)
  if name == 'reference' and not config.rl.reference:
    params = _send(params, part.shardings(layout))
  elif part is not model:  # an adapter
    params = load_adapter(source, model, layout, ledger)
  else:
    params = load_weights.load(source, model, layout, dtype, workdir, seed=config.seed, ledger=ledger)
  params = join(shared, score.frozen_copy(part, params, placed.compute, part.shardings(layout), ledger))
  role = Frozen(params, _program(placed, name, model), layout, model)
  if name == 'reward_model' and config.reward_model.per_step:
    from jaxpost.rl import attached_rewards

    return attached_rewards.StepJudge(**vars(role), tokenizer=placed.inputs.tokenizer)
  if name.startswith('teacher_') and config.distill.align == 'text' and not (placed.distills or ledger.dry):
    from jaxpost.algorithms import teacher_text

    tokenizer = weight_sources.tokenizer_of(source, {})
    return teacher_text.make_text_teacher(role, placed, tokenizer, limit=checks.READ_FIRST)
  return role


def models_of(inputs: Inputs, name: str, beside: bool) -> tuple[Model, Model]:
  """Returns the model of a frozen role, and the part of it whose weights are not shared with the policy.

  Args:
    beside: whether the role has the layout of training, so that it can read the policy's frozen weights in place.
  """
  source, model = inputs.sources[name], inputs.model
  shares = beside
  if name != 'reference' or inputs.config.rl.reference:  # otherwise it is the initial policy
    shares = beside and _shares_frozen_base(source, inputs)
    model = model_lib.frozen_base_model(source.config, model.quantized) if shares else model_lib.build(source.config)
  return model, model_lib.trained_part(model) if shares else model


def _program(placed: PlacedStage, name: str, model: Model) -> Program:
  """Makes the program of a role: scores or, if the loss reads its logits, hidden states or top-k tokens."""
  options: dict[str, Any] = {}
  make: Callable[..., Program] = score.make_score
  if name == 'reference' or (name.startswith('teacher_') and not placed.distills):
    options = dict(temperature=placed.objectives['policy'].temperature)
  elif name.startswith('teacher_'):
    make = score.make_hidden
    distill = placed.config.distill
    if distill.top_k:
      make = score.make_topk
      options = dict(k=distill.top_k, vocab_size=placed.model.config.vocab_size, temperature=distill.temperature)
      if distill.align == 'text':
        # Over the teacher's own vocabulary; `teacher_text` aligns its tokens with those of the student.
        options |= dict(vocab_size=model.config.vocab_size, own=True)
  return make(model, placed.score, placed.compute, placed.ledger, **options)


def _shares_frozen_base(source: Source, inputs: Inputs) -> bool:
  """Returns whether the source is an adapter folder on the policy's frozen base weights."""
  policy = inputs.sources['policy']
  base = _below_adapter(source)
  policy_base = _below_adapter(policy)
  is_adapter = base is not source and base.name and not base.config.lora
  same_base = (base.name, base.config) == (policy_base.name, policy_base.config)
  unmerged = policy.config.lora in ((), inputs.model.config.lora)  # no other adapter was merged into the policy's base
  if not (is_adapter and same_base and unmerged):
    return False
  shared = model_lib.frozen_base_model(source.config, inputs.model.quantized).frozen
  return shared <= inputs.model.frozen


def _below_adapter(source: Source) -> Source:
  """Returns the base of an adapter folder, and other sources as they are."""
  return source.base if source.folder and source.base else source


def load_adapter(source: Source, model: Model, layout: Layout, ledger: Ledger | None) -> dict:
  """Loads the leaves of an adapter folder, without those of its base."""
  part = model_lib.trained_part(model)
  if ledger and ledger.dry:
    return load_weights.described(part, layout, 'float32')
  from jaxpost.formats import peft

  return peft.load(source.folder, model, part.shardings(layout), weight_files.write_piece)


def teacher_heads(placed: PlacedStage, teachers: Sequence[Frozen]) -> tuple[jax.Array, ...]:
  """Returns the output embeddings of teachers in the layout of training, padded for the student."""
  heads = tuple(teacher_head(teacher, placed.model.config) for teacher in teachers)
  return _send(heads, tuple(placed.train.sharding(('vocab', 'embed'), x.shape) for x in heads))


def _send(tree: Any, shardings: Any) -> Any:
  """Moves arrays, or their descriptions, to shardings of any devices; programs may then take over their buffers."""

  def send_one(x, sharding):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if coordination.process_count() > 1 and x.sharding.device_set != sharding.device_set:
      old_parts, new_parts = ([*s.devices_indices_map(x.shape).values()] for s in (x.sharding, sharding))
      if old_parts != new_parts:  # which `device_put` does not change between processes
        return jax.make_array_from_callback(x.shape, sharding, transfer.to_host(x).__getitem__, dtype=x.dtype)
    return jax.device_put(x, sharding)

  sent = jax.tree.map(send_one, tree, shardings)
  if coordination.process_count() > 1 and all(isinstance(x, jax.Array) for x in jax.tree.leaves(sent)):
    jax.block_until_ready(sent)
    coordination.all_gather(None)  # a sender must keep its buffers until all receivers have read
  return sent


def teacher_head(teacher: Frozen, student: ModelConfig) -> jax.Array:
  """Returns a teacher's output embedding [V, D], padded for a student.

  Some families pad the vocabulary of larger models further. A teacher with a smaller vocabulary than the student's
  keeps only the rows of its own tokens; the loss infers from their number which tokens it lacks.
  """
  if teacher.model.head is None:
    raise InputError('config.distill.teachers: a custom model has no output embedding; name a model folder')
  size = teacher.model.config.vocab_size
  head = teacher.model.head(teacher.params)
  rows = student.padded_vocab_size if size >= student.vocab_size else size

  def fit(head: jax.Array) -> jax.Array:
    if len(head) == rows:
      return head
    return jnp.pad(head[:rows], ((0, max(0, rows - len(head))), (0, 0)))

  return jax.eval_shape(fit, head) if isinstance(head, jax.ShapeDtypeStruct) else fit(head)
