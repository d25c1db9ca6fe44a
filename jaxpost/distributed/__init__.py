"""Meshes, transfers between hosts and meshes, coordination of processes, the watchdog.

`mesh` maps logical axes to mesh axes; `phases` makes one mesh per phase and orders its devices, also across TPU slices;
`transfer` moves arrays between hosts, devices and meshes, and `bridge` copies weights to a mesh of other devices.
`cluster` connects processes, `coordination` gathers, broadcasts and agrees, with `channel` where there are several
processes, and `watchdog` ends a run in which a process hangs or dies, of which `peers` tells it.

Imports jax and `errors`; every room above may import it. Never here: models, phases of an
algorithm, files.
"""
