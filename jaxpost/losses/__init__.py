"""Losses, advantages and divergences: functions of arrays, with equation and paper.

Lives here: surrogates and KL estimators, preference losses, losses of critics and reward models, divergences of
distillation, advantage estimators, importance correction, and the fused head that turns hidden states into a loss.
Imports types, matmul, errors and distributed/mesh; programs/ and algorithms/ import it. Never here: models, configs, or
a reduction other than those of reduce.py and pairs.py.
"""
