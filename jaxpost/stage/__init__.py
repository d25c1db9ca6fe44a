"""From a config to one stage on its devices, compiled.

Lives here: the config schema and its parser, the refusals that need no device, where
weights come from, the records between config and loop, compilation before step 0,
evaluation, export. Imports any room below; `stages.py`, planning/ and tools/ import it.
Never here: formulas, jitted functions, what a step of on-policy RL does (rl/).
"""
