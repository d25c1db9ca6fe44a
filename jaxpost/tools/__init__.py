"""Work on finished runs and model folders: export, evaluate, sample, reproduce, the standard workload.

Imports any room below; launch/ imports it. Never here: what training itself needs.
"""
