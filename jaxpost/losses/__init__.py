"""Losses, advantages and divergences: functions of arrays, with equation and paper.

Imports jax and `errors` alone; programs/ and algorithms/ import it. Never here: models,
configs, meshes, or a reduction other than those of reduce.py.
"""
