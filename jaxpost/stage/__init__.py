"""From a config to one stage on its devices, compiled.

Start with `prepare` (what needs no device), then `place` (meshes and shapes), `assemble` (weights, roles, stream) and
`precompile`; `records` has what passes between them. Lives here, too: the config schema and its parser, refusals, where
weights come from, evaluation, export. Imports any room below; `stages.py`, planning/ and tools/ import it.
Never here: formulas, jitted functions, what a step of on-policy RL does (rl/).
"""
