"""Plans a run for a described machine, without its devices.

Lives here: compiling for described chips, counting what compiled programs do, rooflines,
the search for meshes that fit. Imports stage/ and below; launch/ imports it, a run does
only for `mesh=auto`. Never here: anything that a run needs.
"""
