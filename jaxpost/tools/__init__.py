"""Tools on runs and model folders: evaluate, sample, chat, view, compare, export; converters, benchmarks.

`own_loop` gives the parts of a stage to a custom training loop. This package may import any other one; launch/ imports
it. Code that a run needs does not belong here.
"""
