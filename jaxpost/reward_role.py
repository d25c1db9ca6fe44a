"""The reward model as a role: which stage asks it, and what it must be."""

import json
import logging
import pathlib

from jaxpost import config as config_lib
from jaxpost import weights
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError

NAME = 'reward_model'  # in config.reward: a role, not a function
_KEY = 'config.reward_model.path'


def is_asked(config, algorithm) -> bool:
  """Only what learns from rewards loads the model that gives them."""
  return (algorithm.on_policy and algorithm.rewards
          and NAME in config.rewards_tuple())


def find(config, earlier: dict, find_source=weights.find) -> weights.Source:
  """Its weights; `earlier` is {stage: ModelConfig}."""
  path = config.reward_model.path
  if not path:
    raise InputError(f'{_KEY}: is empty, and config.reward asks for a reward '
                     'model; name a folder, RUN or stage:NAME')
  source = find_source(path, _KEY, earlier)
  if not source.config.num_labels:
    raise InputError(f'{_KEY}: {path} is a language model, it has no head '
                     'that gives a reward')
  return source


def weight(config) -> float:
  """Of the reward model beside the reward functions."""
  specs = config.rewards_tuple()
  if not config.reward_weights or NAME not in specs:
    return 1.0
  return config.reward_weights[specs.index(NAME)]


def check(config, algorithm):
  """InputError where its scores cannot be used as this stage would."""
  samples = config.eval.samples if config.eval.data.path else 0
  if algorithm.scalar_head and samples:
    raise InputError(
        'config.eval.samples: a reward model writes no text; set it to 0 in '
        'the stage that trains one')
  if is_asked(config, algorithm):
    if config.rl.dynamic_sampling:
      raise InputError(
          'config.rl.dynamic_sampling: the scores of a reward model always '
          'differ; set it to 0')
    if algorithm.greedy_baseline(config):
      raise InputError(
          f'config.reward: {NAME} does not grade the greedy answer that this '
          'method compares with; use another method, such as rloo')
  elif samples and config.rewards_tuple() == (NAME,):
    raise InputError(
        f'config.eval.samples: only reward functions grade samples here, and '
        f'config.reward has none beside {NAME}; add one or set it to 0')


def check_tokens(config, found: dict, tokenizer, before=()):
  """InputError where a model would read the policy's tokens as other text.

  Args:
    found: {role: Source}; before: stages that run first, `build.Prepared`.
  """
  for role, key, path in (
      (NAME, _KEY, config.reward_model.path),
      ('critic', 'config.critic.path', config.critic.path)):
    if role not in found or not path:
      continue
    theirs = _tokenizer(found[role], before)
    size, needed = (found[k].config.vocab_size for k in (role, 'policy'))
    if size < needed or theirs is None and size != needed:
      raise InputError(
          f'{key}: {path} has a vocabulary of {size}, the policy has {needed}; '
          'it must read the tokens of the policy')
    ours = tokenizer.hf.get_vocab()
    other = theirs.hf.get_vocab() if theirs else ours
    wrong = sorted(t for t in {*ours, *other} if ours.get(t) != other.get(t))
    if wrong:
      raise InputError(
          f'{key}: {path} reads other tokens than the policy: {wrong[0]!r} is '
          f'{other.get(wrong[0])} there and {ours.get(wrong[0])} here; choose '
          f'one that was trained with the tokenizer {tokenizer.source}')


def _tokenizer(source, before):
  """The tokenizer that a model was trained with, or None if nobody knows."""
  if source.stage:
    return {p.name: p.tokenizer for p in before}[source.stage]
  if source.checkpoints is not None:
    run, stage = source.checkpoints.parent.parent, source.checkpoints.name
    saved = config_lib.parse(json.loads((run / 'config.json').read_text()))
    section = saved[stage].model
    return tokenizer_lib.load(section.tokenizer or section.path or 'bytes')
  if source.folder and (source.folder / 'tokenizer.json').exists():
    return tokenizer_lib.load(str(source.folder))
  return None


def pad_id(tokenizer) -> int:
  """A token to pad with at which no text ends.

  transformers reads the score at the last token that is not padding: where
  the end of a turn pads, too, it would read one token early.
  """
  known = (tokenizer.pad_id, tokenizer.bos_id,
           *sorted(tokenizer.hf.added_tokens_decoder))
  good = [i for i in known if i is not None and i not in tokenizer.stop_ids]
  if not good:
    logging.warning(
        '%s: has no token but those that end a text to pad with; read scores '
        'of one text at a time', tokenizer.source)
  return (good or known)[0]


def save_tokenizer(tokenizer, folder):
  """Its files, padding with `pad_id`."""
  tokenizer.save(folder)
  if (pad := pad_id(tokenizer)) != tokenizer.pad_id:
    path = pathlib.Path(folder) / 'tokenizer_config.json'
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved['pad_token'] = tokenizer.hf.convert_ids_to_tokens(pad)
    path.write_text(json.dumps(saved, indent=2) + '\n')
