"""The sampler: an engine completes requests, and a `Rollout` is made of the completions.

`engine` is the interface of engines. `native` implements it with `scheduler` (which request gets which slot) and
`prefix_cache` and `page_table` (the cache), `drafts` (speculation); `jetstream` adapts another engine. `sampler` makes
a Rollout of completions, and `rollout_files` stores it. Programs that draw tokens are in programs/generate.py.

Imports programs/, models/ and below; rl/, environments/ and stage/ import it. Never here: rewards, advantages, updates.
"""
