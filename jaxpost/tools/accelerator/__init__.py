"""Measurements of an accelerator: `python -m launch.bench accelerator --out=FILE`.

`rows.py` is the table of measurements, most important first. `supervisor.py` runs them in a separate process
(`worker.py`), which finds the devices once, and writes a line of JSON as each ends. If that process dies or hangs, its
row gets the error, and a new process continues with the next row. The other modules measure: `chip.py` the device,
`training.py` updates and whole steps, `decoding.py` the sampler. They need no network: weights and data are random.
"""
