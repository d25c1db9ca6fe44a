"""Work on runs and model folders from outside: evaluate, sample, chat, view, compare, export; converters, benches.

`own_loop` gives the parts of a stage to a training loop of the user. Imports any room below; launch/ imports it. Never
here: what a run of a config needs.
"""
