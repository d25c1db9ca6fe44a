"""Plans a run for a described machine, without its devices.

Lives here: compiling for described chips, counting what compiled programs do, rooflines,
the search for meshes that fit. Imports stage/ and below; launch/ imports it, and a run does so
for `mesh=auto` and, on accelerators, for the defaults that memory decides. Never here: what
every run needs.
"""
