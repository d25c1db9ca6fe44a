"""Reward functions, and the pool of killable processes that runs them.

`builtin` lists the rewards with a name and resolves specs, `options` makes a function of a spec, and `pool.RewardPool`
grades groups of completions. The other files hold the rewards themselves: answers (`math`), form (`format`), length
(`length`), programs (`code`), a model behind a URL (`judge`), and functions written for verl (`verl`).

rl/ and tools/ import `pool` and `groups`. This room imports workers/, imports and errors. It never imports JAX: reward
workers must start in milliseconds and must not touch a device. Reward models (roles of a stage) and
environments do not belong here.
"""
