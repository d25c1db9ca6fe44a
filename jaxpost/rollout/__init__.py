"""The sampler: requests in, completions out.

`engine` is the interface of engines. `native` implements it with `engine_programs` (what is compiled), `scheduler`
(which request gets which slot), `sequence` (the sequences, and which finished ones stay in the cache), `page_table`
(the pages of the cache) and `drafts` (speculation); `jetstream` adapts another engine. `sampler` makes a Rollout of
completions, and `rollout_files` stores it. Programs that draw tokens are in programs/generate.py.

Imports programs/, models/ and below; rl/, environments/ and stage/ import it. Never here: rewards,
advantages, updates.
"""
