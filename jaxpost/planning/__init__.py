"""Plans a run for a described machine, without its devices.

It compiles for described chips, counts the costs of compiled programs, computes rooflines and searches for meshes that
fit. It imports stage/ and below. launch/ imports it; a run does so only for `mesh=auto` and, on accelerators, for
defaults that depend on memory.
"""
