"""A stage on meshes of a machine: the sizes that the arithmetic of training and of sampling share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxpost.distributed.phases import parse_mesh
from jaxpost.models.config import CustomConfig, ModelConfig
from jaxpost.planning import meshes

if TYPE_CHECKING:
  from jaxpost.distributed.mesh import Layout
  from jaxpost.matmul import Compute
  from jaxpost.planning import machines
  from jaxpost.stage.batch_shape import BatchShape
  from jaxpost.stage.records import Inputs

FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Case:
  """A stage on meshes of a machine; the rollout mesh is the training mesh if nothing is sampled."""

  inputs: Inputs
  topology: machines.Topology
  train: Layout
  rollout: Layout
  compute: Compute
  shape: BatchShape

  @property
  def cfg(self) -> ModelConfig:
    config = self.inputs.model.config
    assert not isinstance(config, CustomConfig)  # `defaults.room` is None for custom models
    return config

  @functools.cached_property
  def width(self) -> int:
    """Bytes per element of the operands of matrix products."""
    return jnp.dtype(self.compute.dtype).itemsize

  @functools.cached_property
  def score(self) -> Layout:
    """The layout of frozen models."""
    mesh = self.inputs.config.mesh
    if not (mesh.score or mesh.score_devices):
      return self.train
    devices = mesh.score_devices or self.train.mesh.size
    return meshes.layout(parse_mesh(mesh.score or 'fsdp=-1', devices, 'config.mesh.score'))

  @property
  def scores_beside(self) -> bool:
    """True if frozen models share the devices and the layout of training."""
    return self.score == self.train and not self.inputs.config.mesh.score_devices

  @functools.cached_property
  def row_shards(self) -> int:
    return self.train.batch_shards * self.train.mesh.shape['context']

  @functools.cached_property
  def tokens(self) -> int:
    """Tokens of a micro-batch on a device."""
    return self.shape.micro_rows * self.shape.row_length // self.row_shards

  @functools.cached_property
  def context(self) -> float:
    """Mean number of tokens that a token of a row attends to."""
    config = self.inputs.config
    skips_branches = config.train.share_prompt and self.compute.attention == 'triton'
    longest = config.rollout.max_prompt_length + config.rollout.max_new_tokens
    return (longest if skips_branches else self.shape.row_length) / 2

  @property
  def attention_width(self) -> int:
    """Elements per token that attention computes: queries, outputs of the heads, and cache entries."""
    heads, sizes = self.cfg.cached
    return self.cfg.num_heads * (self.cfg.head_dim + self.cfg.value_dim) + heads * sum(sizes)

  @property
  def mlp_width(self) -> int:
    """Hidden size of the MLP, or the sum of those of a token's experts."""
    experts = self.cfg.experts
    return experts.top_k * experts.size if experts else self.cfg.intermediate_size

  def layer_width(self, tensor: int) -> float:
    """Returns the elements per token that a layer computes on one of `tensor` devices: projections, attention, MLP."""
    return (self.attention_width + 3 * self.mlp_width) / tensor + 4 * self.cfg.hidden_size

  def attention_weights(self, tokens: int, length: int, tensor: int) -> float:
    """Returns the bytes of float32 attention weights of the queries that XLA computes at a time; 0 with a kernel."""
    if self.compute.uses_kernel:
      return 0.0
    return tokens * min(self.compute.q_chunk, length) * FLOAT * self.cfg.num_heads / tensor

  def seconds(self, flops: float, moved: float, sent: Mapping[str, Mapping[str, float]] | None = None) -> float:
    """Returns the seconds of compute, memory and network, without overlap.

    Args:
      flops: of a device.
      moved: bytes through the memory of a device.
      sent: {kind: {axis: bytes that a device receives}}.
    """
    chip = self.topology.chip
    wire = meshes.wire_seconds(self.topology, dict(self.train.mesh.shape), sent or {})
    return flops / chip.flops + moved / chip.bandwidth + wire
