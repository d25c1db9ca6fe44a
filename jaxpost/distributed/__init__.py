"""Meshes, transfers between hosts and meshes, coordination of processes, the watchdog.

Imports jax and `errors`; every room above may import it. Never here: models, phases of an
algorithm, files.
"""
