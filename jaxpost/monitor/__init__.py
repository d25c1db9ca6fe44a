"""The reports of a run: metrics, alerts, timelines, the HTML report, health of hosts.

The only room that imports TensorBoard and wandb. Imports programs/, models/, hardware/,
distributed/ and storage/; the loop, stage/ and tools/ import it. Never here: what is
computed in a step.
"""
