"""Meshes, transfers between hosts and meshes, coordination of processes, the watchdog.

`mesh` maps logical axes to mesh axes, and moves arrays between hosts and meshes; `phases` makes one mesh per phase and
orders its devices, also across TPU slices; `bridge` copies weights to a mesh of other devices. `cluster` connects
processes, `coordination` gathers, broadcasts and agrees, `exchange` and `channel` do so where there are several
processes, and `watchdog` ends a run in which a process hangs or dies.

Imports jax and `errors`; every room above may import it. Never here: models, phases of an
algorithm, files.
"""
