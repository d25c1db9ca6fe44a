"""Every program of a run is compiled before its first step, because on an accelerator each takes seconds to minutes."""

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
  """Returns {name: (`data` or `rollouts`, fields that differ from its usual config)}, with these model folders."""
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
def test_no_program_is_compiled_after_the_first_step_begins(tmp_path, monkeypatch, name):
  compile_all, ledgers = precompile.compile_all, []

  def recorded_compile_all(placed, *args):
    memory = compile_all(placed, *args)
    ledgers.append((placed.ledger, len(placed.ledger.rows)))
    return memory

  monkeypatch.setattr(precompile, 'compile_all', recorded_compile_all)
  folders = tiny.folder(tmp_path / 'teacher', hidden_size=24), tiny.folder(tmp_path / 'grader', num_labels=1)
  kind, fields = runs(*folders)[name]
  make = tiny.run_config if kind == 'data' else tiny.grpo_config
  jaxpost.run(tiny.merged(make(tiny.folder(tmp_path / 'model'), **fields), dict(train=dict(steps=2))), tmp_path / 'run')
  ((ledger, count),) = ledgers
  assert count > 1 and [row['program'] for row in ledger.rows[count:]] == []


def test_compile_error_does_not_wait_for_other_programs():
  refused, compiled = threading.Event(), []

  def refuse():
    refused.set()
    raise RuntimeError('out of memory')

  def compile_after_refusal():
    refused.wait()
    time.sleep(0.1)
    compiled.append(1)

  with pytest.raises(RuntimeError, match='out of memory'):
    precompile.run_jobs([refuse, *[compile_after_refusal] * 20])
  assert len(compiled) <= 3  # only the programs that had begun
