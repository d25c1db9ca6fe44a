"""jaxpost: post-training of large language models, native to JAX.

`run(config, workdir)` starts or resumes a run of any algorithm;
`policy_and_stream(config)` gives the parts for a loop of your own. The nouns of
the library (Batch, Rollout, TrainState, Objective, Algorithm, Policy,
Sampler, Stage, ...) can be imported from here. Nothing is imported before it is
used, so that reward workers and `--help` need no JAX.
"""

import importlib

__version__ = '0.1.0'

_WHERE = {
    'run': 'jaxpost.stages',
    'policy_and_stream': 'jaxpost.stages',
    'defaults': 'jaxpost.config',
    'tune_host': 'jaxpost.host',
    'use_compile_cache': 'jaxpost.host',
    'Batch': 'jaxpost.types',
    'Rollout': 'jaxpost.types',
    'TrainState': 'jaxpost.types',
    'Objective': 'jaxpost.programs.train',
    'Outputs': 'jaxpost.types',
    'Experience': 'jaxpost.types',
    'Credit': 'jaxpost.types',
    'Algorithm': 'jaxpost.algorithms.base',
    'Policy': 'jaxpost.roles',
    'Sampler': 'jaxpost.roles',
    'Frozen': 'jaxpost.roles',
    'Roles': 'jaxpost.roles',
    'Stage': 'jaxpost.loop',
}
__all__ = list(_WHERE)


def __getattr__(name):
  if name not in _WHERE:
    raise AttributeError(f'jaxpost has no {name!r}; it has {__all__}')
  return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__():
  return sorted([*__all__, '__version__'])
