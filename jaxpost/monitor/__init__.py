"""The reports of a run: metrics, alerts, timelines, the HTML report, health of hosts.

`metrics.MetricsWriter` writes every metric; loop.py calls it after each step and evaluation. `start` prints what a run
consists of, `activity` what it does while nothing else is printed. `alerts` and `nonfinite` explain bad values,
`host_health` compares hosts, and `timeline` records when devices were busy. `report` makes report.html with titles and
charts from `display`, and `trackers` sends metrics to services. Metrics of rewards are in `rl/reward_metrics`.

Only this package imports TensorBoard, wandb, trackio and MLflow. It imports programs/, models/, hardware/, distributed/
and storage/; the loop, stage/ and tools/ import it. The computations of a step do not belong here.
"""
