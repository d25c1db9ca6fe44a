"""On-policy RL: the controller of a step and the records that it passes along.

Start with `controller`: sample, grade, score, credit, batches. `rollout_queue` decides which weights sample which
rollout, `grading` sends completions to reward functions and reward models, `scoring` runs the models that score them,
`dynamic_sampling` draws more prompts, `curriculum` skips those that are solved, and `batching` packs rollouts into a
Batch.

Imports algorithms/, rollout/, data/ and below; stage/ assembles its parts. Never here: sampling of tokens, and losses.
"""
