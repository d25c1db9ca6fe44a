"""Meshes, transfers between hosts and meshes, coordination of processes, the watchdog.

`mesh` maps logical axes to mesh axes; `phases` makes one mesh per phase and orders its devices, also across TPU slices;
`transfer` moves arrays between hosts, devices and meshes, and `bridge` copies weights to a mesh of other devices.
`cluster` connects processes; `coordination` exchanges values between them, by `channel` if there are several; `peers`
exchanges heartbeats; `watchdog` ends a run in which a process hangs or dies.

Imports jax and `errors`, and knows no models, algorithms or files.
"""
