"""Training methods, one file each: an objective, and how rewards become credit.

Lives here: an `Algorithm` record per method and the checks of its options. Imports losses/,
types, and the examples and chats of data/; is chosen by name in stage/algorithms.py and
imported by nothing else. Never here: sampling, reading of files, layouts of devices.
"""
