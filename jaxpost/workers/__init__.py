"""Processes that run a user's code and can be killed.

Lives here: starting, asking and killing a worker, the sandbox for programs that a model
wrote. Imports the standard library, `errors` and `imports`, and no jax. rewards/ and
environments/ import it. Never here: what is graded or played.
"""
