"""Same model, data, seeds and hyperparameters in several libraries, measured by one program.

`docs/quality.md` has the commands and the results.
"""
