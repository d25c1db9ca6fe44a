"""The reports of a run: metrics, alerts, timelines, the HTML report, health of hosts.

`metrics.MetricsWriter` writes every metric; loop.py calls it after each step and evaluation.
`start` prints what a run is, `activity` what it does while nothing else is printed. `alerts` and `nonfinite` explain
bad values, `host_health` compares hosts, and `timeline` records when devices were busy. `report` makes report.html with
charts from `curves`, and `titles` names metrics; `trackers` sends them to services. `rl/reward_metrics` computes those
of rewards.

The only room that imports TensorBoard, wandb, trackio and MLflow. Imports programs/, models/, hardware/,
distributed/ and storage/; the loop, stage/ and tools/ import it. Never here: what is
computed in a step.
"""
