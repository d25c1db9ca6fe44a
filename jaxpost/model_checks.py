"""What a config asks of models that these cannot do, said before step 0."""

from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.models.config import OwnConfig

_PAIRS = 'dpo', 'orpo', 'cpo', 'simpo', 'kto', 'online_dpo'


def check_teachers(config, found: dict, tokenizer):
  """InputError for teachers that cannot read the student's tokens."""
  probe = 'Zwölf: 12 + 345 = 357, so x_1 ≥ 2\n\treturn "ja"; 日本'
  for i in range(sum(name.startswith('teacher_') for name in found)):
    source = found[f'teacher_{i}']
    key = f'config.distill.teachers[{i}]: {config.distill.teachers[i]}'
    size = source.config.vocab_size
    if source.config.num_labels:
      raise InputError(f'{key} is a reward model, which says nothing of '
                       'tokens; name a language model')
    if size < tokenizer.vocab_size:
      raise InputError(
          f'{key} has a vocabulary of {size}, less than the '
          f'{tokenizer.vocab_size} tokens of {tokenizer.source}; a teacher '
          'must read what the student reads')
    if config.distill.topk > min(size, found['policy'].config.vocab_size):
      raise InputError(
          f'config.distill.topk: {config.distill.topk} of '
          f'{min(size, found["policy"].config.vocab_size)} tokens that student '
          'and teacher share; lower it, or 0 for all of them')
    if source.folder and (source.folder / 'tokenizer.json').exists():
      theirs = tokenizer_lib.load(str(source.folder))
      if theirs.encode(probe) != tokenizer.encode(probe):
        raise InputError(
            f'{key} has another tokenizer than {tokenizer.source}; its tokens '
            'mean something else, so choose a teacher of the same family')


def check_own(config, cfg):
  """InputError for what a model of one's own (`models/custom.py`) lacks."""
  if not isinstance(cfg, OwnConfig):
    return
  asked = {
      'preference.share_prompt=False': config.algorithm in _PAIRS and (
          config.preference.share_prompt),
      'nll.neftune_alpha=0': config.nll.neftune_alpha,
      'rollout.page_size=0': config.rollout.page_size,
      'rollout.share_base=False': config.rollout.share_base}
  for fix, wrong in asked.items():
    if wrong:
      raise InputError(
          f'config.{fix.partition("=")[0]}: {cfg.code}, a model of your own, '
          'is called with parameters, tokens, positions and segments only, '
          f'and samples from a copy; set config.{fix}')


def check_sampler(config, model):
  """InputError where no sampler of this model could do what is asked."""
  if config.rollout.top_logprobs:
    from jaxpost.rollout import settings  # which no SFT run reads
    settings.check_likeliest(
        config.rollout.top_logprobs, model.config.vocab_size)
  if config.rollout.share_base and not model.frozen:
    raise InputError(
        'config.rollout.share_base: is for frozen weights under adapters '
        '(config.lora.rank or config.train.freeze); leave it False')
  if config.rollout.share_base and config.mesh.rollout_devices:
    raise InputError(
        'config.rollout.share_base: the sampler has devices of its own '
        '(config.mesh.rollout_devices), which have no leaves of training; '
        'leave it False')


def check_replay(config, algorithm, found: dict):
  """InputError where rollouts, or their experts, cannot be taken again."""
  if config.replay and (config.router.replay or (
      config.environment and config.reward)):
    raise InputError(
        'config.replay: what is kept of a rollout has neither its experts '
        '(config.router.replay) nor the parts of a reward (config.environment '
        'with config.reward); sample again')
  if config.router.replay and (
      not algorithm.on_policy or algorithm.pack or algorithm.from_data(config)
      or config.environment or set(found) - {'policy', 'reference'}):
    raise InputError(
        'config.router.replay: is for on-policy methods on whole completions, '
        'without data mixed in, environment, critic, reward model or teachers')
