"""Turns a config into a compiled stage on its devices.

Start with `prepare` (all that needs no device), then `place` (meshes and shapes), `assemble` (weights, roles, stream)
and `precompile`; `records` has the records that they pass on. The room also has the config schema and its parser,
checks of configs, sources of weights, evaluation and export. It imports any room below; `stages.py`, planning/ and
tools/ import it. It has no formulas, no jitted functions and no step of on-policy RL (rl/).
"""
