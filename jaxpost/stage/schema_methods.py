"""`option`, which declares a config field, and the sections of methods on data.

These are SFT, preferences, reward models and distillation. The config is in `schema.py`.
"""

import dataclasses
from typing import Any


def option(
  default: Any,
  help_: str,
  *,
  lo: float | None = None,
  hi: float | None = None,
  choices: tuple | None = None,
  each: type | None = None,
  auto: Any = None,
) -> Any:
  """Returns a dataclass field with a help text and the values it may take.

  Args:
    help_: one phrase or sentence for docs/config.md.
    lo, hi: smallest and largest value.
    each: type of the members of a tuple.
    auto: not None for a field whose default stands for the algorithm's value
      (`Algorithm.defaults`); `auto` is used where the algorithm has none.
  """
  given = {'default_factory': dict} if default == {} else {'default': default}
  return dataclasses.field(metadata=dict(help=help_, lo=lo, hi=hi, choices=choices, each=each, auto=auto), **given)


@dataclasses.dataclass(frozen=True)
class NllSection:
  """Cross entropy of supervised fine-tuning."""

  kind: str = option('nll', 'Cross entropy (nll) or dynamic fine-tuning (dft).', choices=('nll', 'dft'))
  label_smoothing: float = option(
    0.0, 'Fraction of the target probability that is spread over the vocabulary.', lo=0.0, hi=1.0
  )
  z_loss: float = option(0.0, 'Weight of the squared log-normalizer of the logits.', lo=0.0)
  neftune_alpha: float = option(0.0, 'Strength of the NEFTune noise on embeddings; 5 is usual, 0: off.', lo=0.0)
  mtp_weight: float = option(
    0.0,
    'Weight of the cross entropy of the module for multi-token prediction, which is trained with the model '
    '(DeepSeek-V3: 0.3, later 0.1); 0: it is not trained.',
    lo=0.0,
  )


@dataclasses.dataclass(frozen=True)
class PreferenceSection:
  """Losses on preference pairs and labeled completions."""

  losses: tuple = option((), "Names of the losses, which are summed; (): the method's own.", each=str, auto=())
  loss_weights: tuple = option((), 'Weight of each loss; (): 1 each.', each=float)
  beta: float = option(0.0, "Strength of the reference; SimPO: of the reward; 0: the method's own.", lo=0.0, auto=0.1)
  label_smoothing: float = option(0.0, 'Fraction of labels assumed to be flipped.', lo=0.0, hi=0.5)
  gamma: float = option(-1.0, "Target margin of SimPO; -1: the method's own.", lo=-1.0, auto=0.5)
  simpo_alpha: float = option(0.0, 'Alpha of AlphaPO, which reshapes the reward of SimPO; 0: plain SimPO.')
  discopop_tau: float = option(0.05, 'Temperature of the blend of the loss discopop.', lo=1e-6)
  ld_alpha: float = option(
    -1.0, "Weight of tokens beyond the length of the shorter answer; -1: the method's own.", lo=-1.0, hi=1.0, auto=1.0
  )
  weighting: str = option(
    '',
    "Weight of each pair: 1 (none), or how likely the policy is to write it (wpo); '': the method's own.",
    auto='none',
    choices=('', 'none', 'wpo'),
  )
  nll_coef: float = option(-1.0, "Weight of the NLL of chosen answers; -1: the method's own.", lo=-1.0, auto=0.0)
  f_divergence: str = option(
    'reverse_kl',
    'Divergence that ties the policy to the reference model.',
    choices=('reverse_kl', 'forward_kl', 'js_divergence', 'alpha_divergence'),
  )
  f_alpha: float = option(0.5, "Alpha of alpha_divergence, as in TRL: 1 - that of f-DPO's paper.", lo=1e-6)
  ipo_average: bool = option(True, 'IPO uses mean log-probs over tokens (as TRL), not sums.')
  desirable_weight: float = option(1.0, 'Weight of desirable completions in KTO.', lo=0.0)
  undesirable_weight: float = option(1.0, 'Weight of undesirable completions in KTO.', lo=0.0)
  share_prompt: bool = option(True, 'Compute the prompt of a pair once for both answers, where the model can.')
  precompute_ref: bool = option(
    False, 'Compute the log-probs of the reference model once and cache them on disk: no second model in memory.'
  )


@dataclasses.dataclass(frozen=True)
class RewardModelSection:
  """A reward model that is trained, or that grades completions."""

  path: str = option('', 'The model that `reward_model` in config.reward stands for, as init_from.')
  loss: str = option('bradley_terry', 'Loss of a reward model.', choices=('bradley_terry', 'regression', 'process'))
  per_step: bool = option(
    False, 'Grade each line of a completion instead of its end, by a model of the loss process: mean probability.'
  )
  center_coef: float = option(0.0, 'Weight of (chosen + rejected)^2, which centers rewards at 0.', lo=0.0)


@dataclasses.dataclass(frozen=True)
class DistillSection:
  """Distillation from teachers."""

  teachers: tuple = option((), 'Teachers (distill, gkd, opd), as init_from.', each=str)
  weights: tuple = option((), 'Weight of each teacher; (): equal weights.', each=float)
  beta: float = option(
    0.5, '0: KL(teacher, student); 1: KL(student, teacher); between: generalized Jensen-Shannon.', lo=0.0, hi=1.0
  )
  temperature: float = option(1.0, 'Temperature of teachers and student.', lo=1e-3)
  top_k: int = option(
    0, 'Most probable tokens of the teacher, computed once and cached on disk; 0: the whole vocabulary.', lo=0
  )
  align: str = option('tokens', 'text: teachers have their own tokenizers (distill, opd).', choices=('tokens', 'text'))
  nll_coef: float = option(0.0, 'Weight of the cross entropy that is added.', lo=0.0)
  on_policy: float = option(1.0, "Fraction of steps on the student's own samples (gkd).", lo=0.0, hi=1.0)
