"""Flags of the standard workload, which `launch.bench` and benchmarks/ time: the fields of `bench.Options`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from absl import flags

if TYPE_CHECKING:
  from jaxpost.tools.bench import Options

flags.disclaim_key_flags()  # the flags belong to the command that defines them


def define() -> list[str]:
  """Defines the flags for the calling command; returns their names."""
  before = set(flags.FLAGS)
  flags.DEFINE_enum('shape', 'xs', ['nano', 'tiny', 'xs', 's'], 'Size of the model.')
  flags.DEFINE_integer('batch', 16, 'Rows of an update (sft), or sequences decoded at a time.', lower_bound=1)
  flags.DEFINE_integer('steps', 5, 'Steps that are timed.', lower_bound=1)
  flags.DEFINE_integer('prompt', 60, 'Tokens of a prompt.', lower_bound=1)
  flags.DEFINE_integer('new', 128, 'Tokens of the longest completion.', lower_bound=1)
  flags.DEFINE_integer('samples', 0, 'Completions to sample; 0: as many as --batch.', lower_bound=0)
  flags.DEFINE_bool('ragged', False, 'Draw the lengths of completions from a geometric distribution.')
  flags.DEFINE_integer('mean', 64, 'Mean length of completions with --ragged, in tokens.', lower_bound=1)
  flags.DEFINE_bool('bf16', False, 'Multiply in bfloat16; the weights stay float32.')
  flags.DEFINE_float('top_p', 1.0, 'Nucleus of sampling; 1: off.', lower_bound=1e-6, upper_bound=1.0)
  flags.DEFINE_bool('share_prompt', False, 'Pack completions of a prompt behind one copy of it (grpo).')
  flags.DEFINE_string('mesh', 'fsdp=-1', 'Device mesh, written as config.mesh.train.')
  flags.DEFINE_bool('tune', True, 'Tune the memory allocator of the host.')
  return [name for name in flags.FLAGS if name not in before]


def options() -> Options:
  """Returns the workload that the flags describe. Imports JAX; tune the host before."""
  from jaxpost.tools import bench

  return bench.Options(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(bench.Options)})
