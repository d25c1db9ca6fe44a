"""On-policy distillation: the student samples, and a teacher grades every token.

The advantage of a token is log T - log pi, which is minus the k1 estimate of KL(student, teacher); its policy gradient
is that of the divergence of next tokens (MiniLLM, arXiv:2306.08543; "On-policy distillation", Thinking Machines 2025).
The teacher is `config.rl.reference`, or there are several, `config.distill.teachers`, whose log-probs are summed with
`config.distill.weights`; an entry of `config.rl.sources` may name its own. If there is a reward, the advantages of GRPO
are added, and `config.rl.kl_coef` weighs the teacher; without one, all rewards are 0, and a prompt needs one completion
only. `distill.py: GKD` learns the whole distribution of the teacher instead.

With `config.rl.privileged` the teacher reads another prompt, from a column of the data
that holds a solution or feedback as well; without a reference it is the policy itself
(self-distillation: OPSD, arXiv:2601.18734; SDPO, arXiv:2601.20802).

With `config.distill.align=text` the teachers have tokenizers of their own. The log-ratio is then that of the text of a
span, which the tokens of the span share (`teacher_text.TextTeacher`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxpost.algorithms import distill, grpo, rl_fields
from jaxpost.algorithms.base import Config
from jaxpost.errors import refuse, refuse_unread
from jaxpost.types import Credit, Experience

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer


# Fields of `config.rl` that need rewards; without any, the advantages of GRPO are all 0.
_OF_REWARDS = ('advantage', 'scale_rewards', 'std_eps', 'singleton', 'pass_k', 'gamma', 'turn_gamma', 'step_weight')
_OF_REWARDS += ('dynamic_sampling', 'keep_surplus', 'replay', 'correct_nll_coef', 'keep_reward', 'correct_by')


def needs(config: Config) -> tuple[str, ...]:
  """Returns the frozen roles: the teachers, or the one reference."""
  return ('teachers',) if config.distill.teachers else ('reference',)


def check(config: Config) -> None:
  """Raises InputError for combinations of fields that cannot work."""
  has_teachers = bool(config.distill.teachers)
  refuse(
    not (config.rl.reference or config.rl.privileged or has_teachers),
    'config.rl.reference: is empty; name the teacher, a folder or RUN[@step], several in config.distill.teachers, '
    'or rl.privileged for self-distillation',
  )
  refuse(
    has_teachers and bool(config.rl.reference),
    'config.rl.reference: config.distill.teachers would ignore it; add it there, or leave one of them empty',
  )
  if config.distill.align == 'text':
    from jaxpost.algorithms import distill_text

    distill_text.check_samples(config)
  read = ('teachers', 'weights', 'align') if has_teachers else ('teachers',)
  refuse_unread(config.distill, read, 'opd', 'distill')
  if has_teachers:
    distill.check(config)
  refuse(
    bool(config.rl.privileged) and bool(config.environment or config.router.routing_replay),
    'config.rl.privileged: goes with neither an environment nor router.routing_replay, which record one prompt only',
  )
  refuse(not config.rl.kl_coef, 'config.rl.kl_coef: 0 leaves the teacher out; 1 is usual')
  # The checks of GRPO would refuse a reference of another model, because GRPO compares no tokenizers.
  config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, reference='', privileged=''))
  is_graded = config.rewards_tuple() or config.environment
  refuse(
    bool(config.rl.curriculum) and not is_graded,
    'config.rl.curriculum: without a reward no prompt is right or wrong; leave it out',
  )
  if not (is_graded or config.train_on_rollouts):
    read_of_rl = {field.name for field in dataclasses.fields(config.rl)} - {*_OF_REWARDS}
    refuse_unread(config.rl, read_of_rl, 'opd without a reward')
  check_rl = rl_fields.check if is_graded else rl_fields.check_shared
  check_rl(config)


def check_roles(config: Config, sources: Mapping[str, Any], tokenizer: Tokenizer) -> None:
  """Raises InputError for a teacher that cannot read the student's tokens."""
  distill.check_teachers(config, sources, tokenizer)
  if 'reference' in sources:
    distill.check_teacher(f'config.rl.reference: {config.rl.reference}', sources['reference'], tokenizer)


def credit(experience: Experience, config: Config) -> Credit:
  """Returns the credit of GRPO and, with `distill.align=text`, the metric `aligned`."""
  result = grpo.credit(experience, config)
  if 'aligned' in experience.arrays:
    aligned = (experience.arrays['aligned'] * experience.mask).sum() / max(experience.mask.sum(), 1)
    result.metrics['aligned'] = float(aligned)
  return result


def check_first_step(metrics: dict, config: Config) -> None:
  """Runs the check of GRPO, except that the KL to a teacher is not 0."""
  grpo.check_first_step({name: value for name, value in metrics.items() if name != 'kl'}, config)


OPD = ALGORITHM = dataclasses.replace(
  grpo.method(kl_in='advantage', kl_coef=1.0),
  sections=('distill', 'rl'),
  needs=needs,
  check=check,
  check_roles=check_roles,
  check_first_step=check_first_step,
  credit=credit,
  rewards=False,
)
