"""Reward functions, and the pool of worker processes that calls them.

Imports workers/, `errors` and `imports`, and no jax: a worker starts in milliseconds. rl/
and stage/ import it. Never here: reward models (a role, stage/reward_model.py) or
environments.
"""
