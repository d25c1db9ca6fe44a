"""Measurements of an accelerator: `python -m launch.bench accelerator --out=FILE`.

`rows.py` is the table of measurements, in order of worth. `supervisor.py` runs them in one
process of its own (`worker.py`), which finds the devices once, and writes a line of JSON as
each ends; where that process dies or hangs, its row gets the error and a new one goes on with
the next. The others measure: `chip.py` the device, `training.py` updates and whole steps,
`decoding.py` the sampler. They need no network: weights are random, documents made up.
"""
