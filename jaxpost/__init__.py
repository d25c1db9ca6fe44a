"""jaxpost: post-training of large language models, native to JAX.

`run(config, workdir)` starts or resumes a run of any algorithm; `policy_and_stream(config)` gives the parts for a loop
of your own. The types of the library (Batch, Rollout, TrainState, Objective, Algorithm, Policy, Sampler, Stage, ...)
can be imported from here. Nothing is imported before it is used, so that reward workers and `--help` need no JAX.
"""

import importlib

__version__ = '0.1.0'

_WHERE = {
  'defaults': 'jaxpost.stage.config',
  'load_config': 'jaxpost.stage.yaml_config',
  'parse_arg': 'jaxpost.stage.config_args',
  'tune_host': 'jaxpost.hardware.host',
  'use_compile_cache': 'jaxpost.hardware.host',
  'Batch': 'jaxpost.types',
  'Rollout': 'jaxpost.types',
  'TrainState': 'jaxpost.types',
  'Objective': 'jaxpost.types',
  'Outputs': 'jaxpost.types',
  'Experience': 'jaxpost.types',
  'Credit': 'jaxpost.types',
  'Algorithm': 'jaxpost.algorithms.base',
  'Policy': 'jaxpost.roles',
  'Sampler': 'jaxpost.rollout.sampler',
  'Frozen': 'jaxpost.roles',
  'Roles': 'jaxpost.roles',
  'Stage': 'jaxpost.loop',
}
__all__ = ['run', 'policy_and_stream', 'choose_mesh', *_WHERE]


def run(config, workdir='runs/latest', console=None, verbose=False) -> dict:
  """Starts or resumes the run in `workdir` and returns what its summary.json holds; see `jaxpost.stages.run`.

  `verbose` prints the table of compiled programs. A mesh of 'auto' is chosen by compiling for the devices of this run.
  Compiled programs are kept as by the commands (`use_compile_cache`), unless JAX already has a folder for them.
  """
  import jax

  from jaxpost import imports, stages
  from jaxpost.hardware import host

  if not jax.config.jax_compilation_cache_dir:
    host.use_compile_cache()
  imports.forget_edited_files()  # since the last run of this session
  return stages.run(config, workdir, console, choose_mesh, verbose=verbose)


def policy_and_stream(config) -> tuple:
  """(policy, stream) for a training loop of your own; see `jaxpost.tools.own_loop`."""
  from jaxpost.tools import own_loop

  return own_loop.policy_and_stream(config, choose_mesh)


def choose_mesh(prepared, note):
  """Resolves meshes of 'auto' by compiling for them; see `jaxpost.planning.auto`."""
  from jaxpost.planning import auto  # only here: a run on CPUs whose meshes are given imports no planner

  return auto.resolve(prepared, note)


def __getattr__(name):
  if name not in _WHERE:
    raise AttributeError(f'jaxpost has no {name!r}; it has {__all__}')
  return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__():
  return sorted([*__all__, '__version__'])
