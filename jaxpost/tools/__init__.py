"""Work on runs and model folders from outside: evaluate, sample, chat, view, compare, export; converters, benches.

Imports any room below; launch/ imports it. Never here: what training itself needs.
"""
