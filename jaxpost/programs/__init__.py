"""Everything that is compiled: the only room with `jax.jit` in a training run.

Lives here: update, score, prefill, insert, generate, extend, reshard, and the ledger of
compiled programs. Imports formats/ (to load folders), models/, losses/, distributed/, hardware/memory and below;
roles.py, rollout/ and stage/ import it. Never here: loops over steps, files, decisions of the host.
"""
