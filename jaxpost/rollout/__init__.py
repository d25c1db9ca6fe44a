"""The sampler: requests in, completions out.

Lives here: the engine protocol, the native engine with its scheduler and key-value cache,
the JetStream adapter, and rollouts on disk. Imports programs/, models/ and below; rl/,
environments/ and stage/ import it. Never here: rewards, advantages, updates.
"""
