"""Several adapters on one base: roles that share it, answers side by side."""

import json
import os
import pathlib
import subprocess
import sys

import children
import jax
import numpy as np
import pytest
import rich.console
import tiny

from jaxpost import stages
from jaxpost.data import tokenizer
from jaxpost.errors import InputError
from jaxpost.hardware import memory
from jaxpost.models.config import Experts
from jaxpost.monitor import metrics
from jaxpost.stage import assemble, on_policy, place, prepare
from jaxpost.tools import completion_files, completions, inference
from jaxpost.types import Prompt

ROOT = pathlib.Path(__file__).parents[1]
CONSOLE = rich.console.Console(quiet=True)
PAIRS = 'generated:arithmetic_pairs:max=99,split=train,size=60'


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """(base folder, {name: folder of an adapter on it})."""
  root = tmp_path_factory.mktemp('adapters')
  base = tiny.folder(root / 'base', num_layers=2)
  tokenizer.load('bytes').save(base)
  runs = {
    'one': dict(lora=dict(rank=2), optim=dict(lr=3e-2)),
    'two': dict(lora=dict(rank=3, targets='q|v'), seed=1, optim=dict(lr=3e-2)),
    'judge': dict(
      algorithm='reward_model',
      lora=dict(rank=2),
      data=dict(path=PAIRS),
      optim=dict(lr=3e-2),
      train=dict(batch_size=4, row_length=96),
    ),
  }
  for name, over in runs.items():
    stages.run(tiny.merged(tiny.run_config(base), dict(save=dict(export=True)) | over), root / name, CONSOLE)
  return base, {name: str(root / name / 'export/adapter') for name in runs}


def parts(config):
  kit = place.place_stage(prepare.prepare_all(config)[0])
  roles, stream, _ = assemble.make_parts(kit, stages.initial_params(kit, None))
  stream.close()
  return roles


def pointers(tree):
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


def shares(role, policy):
  return pointers(policy.frozen['params']) <= pointers(role.params)


@pytest.mark.parametrize('kind', ['', 'int8'])
def test_a_teacher_on_the_base_of_the_student(made, kind):
  base, adapters = made
  over = dict(algorithm='distill', lora=dict(rank=2), model=dict(quantize=kind), train=dict(batch_size=2))

  def build_with(teacher):
    return parts(tiny.merged(tiny.run_config(base), over | (dict(distill=dict(teachers=(teacher,))))))

  roles = build_with(adapters['two'])
  (teacher,) = roles.teachers
  assert shares(teacher, roles.policy)
  rows = roles.policy.place(prepare.prepare_all(tiny.run_config(base))[0].data.first_batch)
  found = np.asarray(teacher(rows))
  (alone,) = build_with(str(pathlib.Path(adapters['two']).parent)).teachers
  assert not shares(alone, roles.policy)
  other = np.asarray(alone(rows))
  if not kind:  # the merged folder is not quantized
    np.testing.assert_allclose(found, other, atol=1e-4 * np.abs(other).max())
  assert np.abs(found - other).max() < 0.3 * np.abs(other).max()


def test_a_reward_model_on_the_base_of_the_policy(made):
  base, adapters = made

  def build_with(path, **lora):
    return parts(tiny.grpo_config(base, lora=lora or dict(rank=2), reward='reward_model', reward_model=dict(path=path)))

  roles = build_with(adapters['judge'])
  judge = roles.reward_model
  assert shares(judge, roles.policy) and 'score' in judge.params
  rows = roles.policy.place(prepare.prepare_all(tiny.run_config(base))[0].data.first_batch)
  found = np.asarray(judge(rows).values)
  alone = build_with(str(pathlib.Path(adapters['judge']).parent)).reward_model
  np.testing.assert_allclose(found, alone(rows).values, rtol=1e-4, atol=1e-5)
  assert np.abs(found).max() > 0
  # A base that is trained, or that an adapter is merged into, is not shared.
  assert not shares(build_with(adapters['judge'], rank=0).reward_model, roles.policy)


def test_a_policy_on_another_adapter_shares_nothing(made):
  base, adapters = made
  roles = parts(
    tiny.merged(
      tiny.run_config(adapters['one']),
      dict(algorithm='distill', lora=dict(rank=4), distill=dict(teachers=(adapters['two'],))),
    )
  )
  assert not shares(roles.teachers[0], roles.policy)  # `one` is merged below


def test_an_adapter_is_its_own_reference(made):
  """DPO from an SFT adapter: it stays as reference beside what is trained."""
  base, adapters = made
  roles = parts(
    tiny.merged(
      tiny.run_config(base),
      dict(
        algorithm='dpo', lora=dict(path=adapters['one']), data=dict(path=PAIRS), train=dict(batch_size=4, row_length=96)
      ),
    )
  )
  assert shares(roles.reference, roles.policy)
  jax.tree.map(np.testing.assert_array_equal, roles.reference.params['lora'], roles.policy.state.params['lora'])


def test_adapters_share_the_base_and_answer_as_alone(made):
  base, adapters = made
  weights = inference.from_folder(base)
  named = [f'{name}={adapters[name]}' for name in ('one', 'two')]
  each = inference.adapters(weights, named)
  assert list(each) == ['one', 'two']
  for w in each.values():
    assert pointers(weights.params) <= pointers(w.params)
  prompts = completions.make_prompts(weights, ['1+2=', '30+4='], as_chat=False)
  draws, rows = completions.Draws(max_new_tokens=8, temperature=0.0), []
  completion_files.finish(each, prompts, draws, 'data=-1', '', source='', show=rows.append)
  assert [r['adapter'] for r in rows] == ['one', 'one', 'two', 'two']
  for name in each:
    alone = completions.completion_rows(
      completions.complete(inference.from_folder(adapters[name]), prompts, draws), weights.inputs.tokenizer
    )
    mine = [r for r in rows if r['adapter'] == name]
    assert [r['completion'] for r in mine] == [r['completion'] for r in alone]
    np.testing.assert_allclose([r['logprob'] for r in mine], [r['logprob'] for r in alone], atol=2e-3)
  assert inference.adapters(weights, []) == {'': weights}


@pytest.mark.parametrize('stage', ['one', 'codes'])
def test_an_adapter_on_a_run_with_one_of_its_own(made, tmp_path, stage):
  """The run's is a part of the base then, and in codes it is whole again."""
  base, adapters = made
  run = tmp_path / 'codes'
  if stage == 'codes':
    stages.run(
      tiny.merged(
        tiny.run_config(base),
        dict(lora=dict(rank=2), model=dict(quantize='int8'), train=dict(steps=2), optim=dict(lr=3e-2)),
      ),
      run,
      CONSOLE,
    )
  else:
    run = pathlib.Path(adapters['one']).parents[1]
  weights = inference.from_run(run)
  found = inference.adapters(weights, [f'two={adapters["two"]}'])['two']
  assert {p.split('/')[2] for p in found.inputs.model.table if p.startswith('lora/')} == {'q', 'v'}
  merged = weights.inputs.model.merge(weights.params)
  own = {k: v for k, v in found.params.items() if k != 'lora'}
  jax.tree.map(np.testing.assert_array_equal, own, merged)
  assert set(found.params['lora']['layers']) == {'q', 'v'}


@pytest.mark.parametrize('values', [['x'], ['=x'], ['a=x', 'a=y']])
def test_a_bad_flag_is_one_line(made, values):
  with pytest.raises(InputError, match='--adapter: takes NAME=FOLDER'):
    inference.adapters(inference.from_folder(made[0]), values)


def test_commands(made, tmp_path):
  base, adapters = made

  def run(*args):
    return subprocess.run(
      [sys.executable, '-m', *args],
      cwd=ROOT,
      capture_output=True,
      text=True,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
    )

  done = run(
    'launch.sample',
    f'--model={base}',
    '--prompt=1+2=',
    '--json',
    *(f'--adapter={n}={adapters[n]}' for n in ('one', 'two')),
    '--max_new_tokens=4',
  )
  assert done.returncode == 0, done.stderr[-2000:]
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  assert [r['adapter'] for r in rows] == ['one', 'two']
  done = run(
    'launch.sample',
    f'--model={base}',
    '--prompt=1',
    '--out=x.jsonl',
    *(f'--adapter={n}={adapters[n]}' for n in ('one', 'two')),
  )
  assert done.returncode == 2 and 'name one --adapter' in done.stderr
  done = run('launch.export', f'--model={adapters["one"]}', f'--out={tmp_path / "merged"}')
  assert done.returncode == 0, done.stderr[-2000:]
  ours, theirs = (inference.from_folder(f) for f in (tmp_path / 'merged', pathlib.Path(adapters['one']).parent))
  for a, b in zip(*(jax.tree.leaves(w.params) for w in (ours, theirs))):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------- a sampler's base


def sampler(base, kind, share, targets=''):
  """(policy, engine) of a stage, loaded."""
  made = tiny.merged(
    tiny.grpo_config(
      base,
      lora=dict(rank=2) | (dict(targets=targets) if targets else {}),
      rollout=dict(share_base=share, max_new_tokens=8, slots=4),
    ),
    dict(model=dict(quantize=kind)),
  )
  kit = place.place_stage(prepare.prepare_all(made)[0])
  roles, stream, engine = assemble.make_parts(kit, stages.initial_params(kit, None))
  stream.close()
  policy = roles.policy
  noise = np.random.RandomState(0)
  policy.state = policy.state.replace(
    params=jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(np.float32), policy.state.params)
  )
  return policy, engine, engine.load(policy.params, 0)['bytes']


@pytest.mark.parametrize('kind', ['', 'int8', 'nf4'])
def test_a_sampler_shares_the_base(made, kind):
  check_shared(made[0], kind)


def check_shared(base, kind, targets=''):
  policy, engine, moved = sampler(base, kind, True, targets)
  other, merged, more = sampler(base, kind, False, targets)
  fixed = pointers(policy.frozen['params'])
  assert fixed <= pointers(engine.weights)
  assert not fixed & pointers(merged.weights)
  own = pointers(policy.state.params)  # which an update takes over
  assert not own & pointers(engine.weights)
  assert moved == sum(x.nbytes for x in jax.tree.leaves(policy.state.params)) < more / 2
  prompts = [Prompt(i, np.arange(40, 45 + i, dtype=np.int32), '', {}) for i in range(3)]
  one, two = (e(prompts, group_size=2, run_key=on_policy.run_key(0, 1), step=0) for e in (engine, merged))
  np.testing.assert_array_equal(one.completions, two.completions)
  np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)


def test_what_a_sampler_shares_is_predicted_once(made):
  """The sampler of a run that shares the base holds no more than copies of what is trained."""
  held = {}
  for share in (False, True):
    policy, engine, _ = sampler(made[0], '', share)
    there = memory.distinct(policy.params)
    own = {key: x for key, x in memory.distinct(engine.described(policy.params)[0]).items() if key not in there}
    held[share] = memory.size(own)
  assert held[True] == memory.size(policy.state.params) < held[False]


SPLIT = """
import sys
sys.path.insert(0, 'tests')
import numpy as np, tiny
from jaxpost.stage import assemble, on_policy, place, prepare
from jaxpost import stages
from jaxpost.types import Prompt
out = []
for mesh, share in (('data=-1', False), ('data=-1', True),
                    ('data=2,tensor=2', True)):
  p, = prepare.prepare_all(tiny.merged(tiny.grpo_config(
      sys.argv[1], lora=dict(rank=4), mesh=dict(train='fsdp=-1', rollout=mesh),
      rollout=dict(share_base=share, max_new_tokens=8, slots=8)),
      dict(model=dict(quantize=sys.argv[2]))))
  kit = place.place_stage(p)
  roles, stream, engine = assemble.make_parts(
      kit, stages.initial_params(kit, None))
  stream.close()
  engine.load(roles.policy.params, 0)
  prompts = [Prompt(i, np.arange(40, 45 + i, dtype=np.int32), '', {})
             for i in range(4)]
  out.append(engine(prompts, group_size=2, step=0,
                    run_key=on_policy.run_key(0, 1)))
for one in out:
  np.testing.assert_array_equal(one.completions, out[0].completions)
  np.testing.assert_allclose(one.logprobs, out[0].logprobs, atol=1e-4)
"""


@pytest.mark.parametrize('kind', ['', 'int8'])
def test_a_sampler_on_a_mesh_shares_the_base(tmp_path, kind):
  base = tiny.folder(tmp_path / 'base', num_heads=8, num_kv_heads=8)
  children.run('-c', SPLIT, base, kind, devices=4, timeout=600)


EXPERTS = dict(
  qwen3_moe=('q|o|experts/(gate|up|down)', dict(experts=Experts(4, 2, 16))),
  # One dense layer, two of experts; its kv_b is used from both sides.
  deepseek_v3=('q_b|kv_b|o|dense/gate|experts/(gate|up|down)', dict(num_kv_heads=2)),
)


@pytest.mark.parametrize('family', EXPERTS)
@pytest.mark.parametrize('kind', ['', 'int8'])
def test_a_sampler_shares_experts(tmp_path, kind, family):
  targets, shape = EXPERTS[family]
  base = tiny.folder(tmp_path / 'base', family=family, num_layers=3, tie_embeddings=False, **shape)
  tokenizer.load('bytes').save(base)
  check_shared(base, kind, targets)


@pytest.mark.parametrize('kind', ['', 'nf4'])
def test_grpo_learns_on_one_base(made, tmp_path, kind):
  config = tiny.merged(
    tiny.grpo_config(
      made[0],
      lora=dict(rank=4),
      optim=dict(lr=2e-2),
      rollout=dict(prompts=8, group_size=8, share_base=True),
      train=dict(steps=12),
    ),
    dict(model=dict(quantize=kind)),
  )
  stages.run(config, tmp_path, CONSOLE)
  rows = [r for r in metrics.comparable_rows(tmp_path / 'metrics.jsonl') if r['split'] == 'train']
  rewards = [r['reward'] for r in rows]
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
  for row in rows:
    assert row['sampler_mismatch'] == pytest.approx(1, abs=1e-3)


def test_a_base_that_is_trained_is_not_shared(made):
  with pytest.raises(InputError, match='share_base: is for frozen weights'):
    prepare.prepare_all(tiny.grpo_config(made[0], rollout=dict(share_base=True)))
