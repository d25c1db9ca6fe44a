"""Training methods, one file each: an objective, and how rewards become credit.

`base.Algorithm` is the record that each file fills, together with the checks of its options. `grpo` serves the whole
GRPO family, including the KL term in the loss or in the reward; `rl_fields` holds its defaults and checks, `rl_checks`
the checks of its optional features, `token_terms` its optional terms of single tokens; `preference` serves DPO, ORPO,
CPO and SimPO; `teachers` and `teacher_text` say what the teachers of `opd` read, and join their log-probs.

Imports losses/, roles, types, and what data/ makes of rows. stage/algorithms.py imports a method by its name, and
nothing else does. Never here: sampling, reading of files, layouts of devices.
"""
