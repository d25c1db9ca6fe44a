"""Rows and RoPE scaling: warnings about rows longer than the model's positions, and prompts that cannot be shared."""

import logging

import pytest
import tiny

from jaxpost.models.config import Rope
from jaxpost.stage import model_limits, prepare


def yarn(**fields):
  return Rope(1e6, (('rope_type', 'yarn'), ('factor', 4.0), *fields.items()))


@pytest.mark.parametrize(
  'rope, longest',
  [
    (Rope(1e6), 64),
    (yarn(original_max_position_embeddings=64), 256),
    (yarn(original_max_position_embeddings=16), 64),
    (Rope(1e6, (('rope_type', 'linear'), ('factor', 2.0))), 128),
    (Rope(1e6, (('rope_type', 'llama3'), ('factor', 32.0), ('original_max_position_embeddings', 8))), 64),
  ],
)
def test_longest_row_includes_the_rope_scaling(rope, longest):
  assert model_limits.longest(tiny.config(max_position=64, ropes=(rope,))) == longest


def grpo(row_length, max_new_tokens):
  rollout = dict(max_prompt_length=40, max_new_tokens=max_new_tokens)
  return dict(algorithm='grpo', reward='exact_match', train=dict(row_length=row_length), rollout=rollout)


@pytest.mark.parametrize(
  'over, warning',
  [
    (dict(train=dict(row_length=65)), 'config.train.row_length: 65 tokens are more than the 64 positions'),
    (dict(train=dict(row_length=64)), ''),
    (grpo(0, 25), 'config.rollout: max_prompt_length + max_new_tokens: 65 tokens are more than the 64'),
    (grpo(256, 24), ''),
  ],
)
def test_rows_longer_than_the_positions_are_warned_of(over, warning, tmp_path, caplog):
  folder = tiny.folder(tmp_path / 'model', max_position=64, vocab_size=259)
  config = tiny.merged(tiny.run_config(folder), tiny.merged(dict(data=dict(path='generated:arithmetic')), over))
  with caplog.at_level(logging.WARNING):
    for stage in prepare.prepare_all(config):
      stage.close()
  lines = [record.getMessage() for record in caplog.records if 'positions' in record.getMessage()]
  assert len(lines) == bool(warning) and all(warning in line for line in lines)


LONGROPE = (('factor', 4.0), ('long_factor', (2.0,) * 4), ('original_max_position_embeddings', 64))
LONGROPE += (('rope_type', 'longrope'), ('short_factor', (1.0,) * 4))
DYNAMIC = (('factor', 4.0), ('original_max_position_embeddings', 64), ('rope_type', 'dynamic'))
ONLINE = dict(
  algorithm='online_dpo', reward='exact_match', rollout=dict(max_prompt_length=40, max_new_tokens=24, group_size=2)
)
ONLINE |= dict(data=dict(path='generated:arithmetic:size=8'))


PAIRS = dict(algorithm='dpo', data=dict(path='generated:arithmetic_pairs:size=8'))


@pytest.mark.parametrize(
  'family, scaling, over, unshared',
  [
    ('phi3', LONGROPE, PAIRS, True),
    ('llama', DYNAMIC, PAIRS, True),
    ('phi3', LONGROPE, PAIRS | dict(algorithm='reward_model'), True),
    ('phi3', LONGROPE, dict(algorithm='kto', data=dict(path='generated:arithmetic_labels:size=8')), True),
    ('phi3', LONGROPE, PAIRS | dict(preference=dict(share_prompt=False)), False),
    ('llama', DYNAMIC, PAIRS | dict(train=dict(row_length=64)), False),
    ('phi3', LONGROPE, dict(data=dict(path='generated:arithmetic:size=8')), False),
    ('phi3', LONGROPE, ONLINE, False),  # whose sequences are not longer than 64 tokens
  ],
)
def test_prompt_is_not_shared_if_its_rotation_depends_on_the_row_length(
  family, scaling, over, unshared, tmp_path, caplog
):
  folder = tiny.folder(
    tmp_path / 'model', family=family, qk_norm='', max_position=64, vocab_size=259, ropes=(Rope(1e4, scaling),)
  )
  config = tiny.merged(tiny.run_config(folder), tiny.merged(dict(train=dict(row_length=128)), over))
  (stage,) = prepare.prepare_all(config)
  stage.close()
  assert caplog.text.count('config.preference.share_prompt: is taken as False, because the policy') == unshared
  first = stage.data.first_batch
  assert stage.config.preference.share_prompt != (unshared or over.get('preference') is not None)
  assert first is None or not unshared or first.branch_ids is None
