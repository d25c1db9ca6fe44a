"""Benchmarks of the sampler's parts: that they measure what they say."""

import pytest

from jaxpost.tools import bench


def test_weights_are_moved_and_copied(tmp_path):
  found = bench.run('reshard', bench.Options(shape='tiny', steps=2, bf16=True), tmp_path)
  assert found['moved_gb'] > 0 and found['shared_gb'] > 0
  assert found['gb_per_s'] > 0 and found['share_of_copy'] == pytest.approx(found['gb_per_s'] / found['copy_gb_per_s'])


def test_a_step_is_held_against_what_it_reads(tmp_path):
  found = bench.run('sample', bench.Options(shape='tiny', steps=1, batch=1, new=8), tmp_path)
  assert 320 * 128 * 4 < found['decode_bytes'] < 4e6  # embedding, 0.9 M
  longer = bench.run('sample', bench.Options(shape='tiny', steps=1, batch=1, new=8, prompt=100), tmp_path)
  assert found['tokens'] == longer['tokens']
  entry = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, sizes
  assert longer['decode_bytes'] - found['decode_bytes'] == 40 * entry
  assert (
    0 < found['share_of_bandwidth'] == pytest.approx(found['decode_bytes'] / found['decode_s'] / found['bytes_per_s'])
  )


def test_turns_read_less_where_their_cache_is_kept(tmp_path):
  found = bench.run('turns', bench.Options(shape='tiny', steps=1, batch=4, new=4), tmp_path)
  assert found['kept/tokens'] == found['read/tokens'] > 0
  assert found['read/tokens_cached'] == 0 < found['kept/tokens_cached']
  assert found['kept/tokens_prefilled'] + found['kept/tokens_cached'] == (found['read/tokens_prefilled'])
