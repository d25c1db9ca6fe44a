"""The reports of a run: metrics, alerts, timelines, the HTML report, health of hosts.

`metrics.MetricsWriter` writes every metric; loop.py calls it after each step and evaluation.
`alerts` and `nonfinite` explain bad values, `host_health` compares hosts, `timeline` records
when devices were busy, and `report` makes report.html. `rl/reward_metrics` computes the metrics of rewards.

The only room that imports TensorBoard, wandb, trackio and MLflow. Imports programs/, models/, hardware/,
distributed/ and storage/; the loop, stage/ and tools/ import it. Never here: what is
computed in a step.
"""
