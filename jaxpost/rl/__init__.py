"""On-policy RL: the controller of a step and the records that it passes along.

Lives here: the controller (sample, grade, score, credit, batches), the queue of rollouts
beneath it, grading, and packing rollouts into batches. Imports algorithms/, rollout/,
data/ and below; stage/ puts it together. Never here: how a token is drawn or a loss is
computed.
"""
