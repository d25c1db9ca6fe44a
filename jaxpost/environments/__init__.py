"""Multi-turn episodes: the model's turns and what tools or agents answer.

Lives here: environment processes and their pool, tool schemas, episodes, an
OpenAI-compatible server for external agents, two example environments. Imports rollout/,
data/, workers/; stage/ starts it. Never here: single-turn sampling, reward functions.
"""
