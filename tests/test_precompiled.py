"""Every program of a run is compiled before its first step: on an accelerator each takes from seconds to minutes."""

import threading
import time

import pytest
import tiny

import jaxpost
from jaxpost.stage import precompile

PAIRS = dict(path='generated:arithmetic_pairs:max=99,ops=+,split=train,size=40')
HELD_OUT = dict(every=1, size=8, samples=2, data=dict(path='generated:arithmetic:max=99,ops=+,split=test,size=20'))
SHARED = dict(train=dict(share_prompt=True))


def runs(teacher, grader=''):
  """Name -> (what is learned from, fields that differ from that config), with folders of models."""
  graded = dict(reward_model=dict(path=grader))
  return {
    'sft': ('data', dict(eval=HELD_OUT, reward=tiny.low_share)),
    'dpo': ('data', dict(algorithm='dpo', data=PAIRS, eval=dict(every=1, size=8, data=PAIRS))),
    'distill': ('data', dict(algorithm='distill', distill=dict(teachers=(teacher,)))),
    'gkd_shared': ('rollouts', dict(algorithm='gkd', reward='', distill=dict(teachers=(teacher,))) | SHARED),
    'grpo_shared': ('rollouts', dict(rl=dict(kl_coef=0.1, minibatches=2), eval=HELD_OUT) | SHARED),
    'remax': ('rollouts', dict(algorithm='remax')),
    'online_dpo_graded': ('rollouts', dict(algorithm='online_dpo', reward='reward_model') | graded),
  }


@pytest.mark.parametrize('name', runs(''))
def test_steps_compile_nothing(tmp_path, monkeypatch, name):
  compile_all, found = precompile.compile_all, []

  def watched(placed, *args):
    memory = compile_all(placed, *args)
    found.append((placed.ledger, len(placed.ledger.rows)))
    return memory

  monkeypatch.setattr(precompile, 'compile_all', watched)
  folders = tiny.folder(tmp_path / 'teacher', hidden_size=24), tiny.folder(tmp_path / 'grader', num_labels=1)
  kind, fields = runs(*folders)[name]
  make = tiny.run_config if kind == 'data' else tiny.grpo_config
  jaxpost.run(tiny.merged(make(tiny.folder(tmp_path / 'model'), **fields), dict(train=dict(steps=2))), tmp_path / 'run')
  ((ledger, count),) = found
  assert count > 1 and [row['program'] for row in ledger.rows[count:]] == []


def test_an_error_waits_for_no_other_program():
  refused, compiled = threading.Event(), []

  def refuse():
    refused.set()
    raise RuntimeError('out of memory')

  def other():
    refused.wait()
    time.sleep(0.1)
    compiled.append(1)

  with pytest.raises(RuntimeError, match='out of memory'):
    precompile.run_jobs([refuse, *[other] * 20])
  assert len(compiled) <= 3  # those that had begun
