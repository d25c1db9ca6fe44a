"""The machine: data about chips, memory, signals, measured speed, compiler options, numerical checks of kernels.

Imports models/ (to check kernels) and below; programs, stage/, planning/ and tools/ import it. Its small jitted probes
are the only jitted functions outside of programs/. It makes no decisions about a run.
"""
