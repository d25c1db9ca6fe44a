"""Measurements of parts of the library, for those who change it; no part of the wheel.

Each file but `command` is a script: `python benchmarks/NAME.py --help` from a clone lists
its flags. What users time is `python -m launch.bench sft|sample|grpo`. Nothing in jaxpost/
or launch/ imports this folder. Never here: checks that something is right; those are tests.
"""
