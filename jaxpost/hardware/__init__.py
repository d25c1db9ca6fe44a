"""The machine: chips as data, memory, signals, measured speed, numerical checks of kernels.

Imports models/ (to check kernels) and below; programs, stage/, planning/ and tools/ import
it. Its small jitted probes are the only ones outside of programs/. Never here: decisions
about a run.
"""
