"""LoRA adapters on one base: roles, the sampler and the command line share its weights and compute the same."""

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
def trained_adapters(tmp_path_factory):
  """(base folder, {name: folder of an adapter on it}); each adapter was trained by a short run."""
  root = tmp_path_factory.mktemp('adapters')
  base = tiny.folder(root / 'base', num_layers=2)
  tokenizer.load('bytes').save(base)
  runs = {
    'one': dict(lora=dict(rank=2), optim=dict(lr=3e-2), data=dict(chat_template='mistral')),
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
  """The Roles of the first stage of a config."""
  kit = place.place_stage(prepare.prepare_all(config)[0])
  roles, stream, _ = assemble.make_parts(kit, stages.initial_params(kit, None))
  stream.close()
  return roles


def shares(role, policy):
  """Whether the arrays of a role include those of the frozen base of the policy."""
  return tiny.pointers(policy.frozen['params']) <= tiny.pointers(role.params)


@pytest.mark.parametrize('kind', ['', 'int8'])
def test_teacher_adapter_shares_the_base_of_the_student(trained_adapters, kind):
  base, adapters = trained_adapters
  over = dict(algorithm='distill', lora=dict(rank=2), model=dict(quantize=kind), train=dict(batch_size=2))

  def build_with(teacher):
    return parts(tiny.merged(tiny.run_config(base), over | (dict(distill=dict(teachers=(teacher,))))))

  roles = build_with(adapters['two'])
  (teacher,) = roles.teachers
  assert shares(teacher, roles.policy)
  rows = roles.policy.place(prepare.prepare_all(tiny.run_config(base))[0].data.first_batch)
  actual = np.asarray(teacher(rows))
  (alone,) = build_with(str(pathlib.Path(adapters['two']).parent)).teachers
  assert not shares(alone, roles.policy)
  expected = np.asarray(alone(rows))
  if not kind:  # the merged folder is not quantized
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
  assert np.abs(actual - expected).max() < 0.3 * np.abs(expected).max()


def test_reward_model_adapter_shares_the_base_of_the_policy(trained_adapters):
  base, adapters = trained_adapters

  def build_with(path, **lora):
    return parts(tiny.grpo_config(base, lora=lora or dict(rank=2), reward='reward_model', reward_model=dict(path=path)))

  roles = build_with(adapters['judge'])
  judge = roles.reward_model
  assert shares(judge, roles.policy) and 'score' in judge.params
  rows = roles.policy.place(prepare.prepare_all(tiny.run_config(base))[0].data.first_batch)
  scores = np.asarray(judge(rows).values)
  alone = build_with(str(pathlib.Path(adapters['judge']).parent)).reward_model
  np.testing.assert_allclose(scores, alone(rows).values, rtol=1e-4, atol=1e-5)
  assert np.abs(scores).max() > 0
  # A base that is trained is not shared.
  assert not shares(build_with(adapters['judge'], rank=0).reward_model, roles.policy)


def test_teacher_does_not_share_a_base_into_which_an_adapter_is_merged(trained_adapters):
  base, adapters = trained_adapters
  roles = parts(
    tiny.merged(
      tiny.run_config(adapters['one']),
      dict(algorithm='distill', lora=dict(rank=4), distill=dict(teachers=(adapters['two'],))),
    )
  )
  assert not shares(roles.teachers[0], roles.policy)  # `one` is merged into the base of the policy


def test_dpo_reference_is_the_initial_adapter_on_the_shared_base(trained_adapters):
  """DPO continues an SFT adapter; a copy of the initial adapter on the shared base is the reference."""
  base, adapters = trained_adapters
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


def test_adapters_served_together_share_the_base_and_answer_as_alone(trained_adapters):
  base, adapters = trained_adapters
  weights = inference.from_folder(base)
  flags = [f'{name}={adapters[name]}' for name in ('one', 'two')]
  by_name = inference.adapters(weights, flags)
  assert list(by_name) == ['one', 'two']
  for w in by_name.values():
    assert tiny.pointers(weights.params) <= tiny.pointers(w.params)
  prompts = completions.make_prompts(weights, ['1+2=', '30+4='], as_chat=False)
  draws, rows = completions.Draws(max_new_tokens=8, temperature=0.0), []
  completion_files.complete_all(by_name, prompts, draws, 'data=-1', '', source='', show=rows.append)
  assert [r['adapter'] for r in rows] == ['one', 'one', 'two', 'two']
  for name in by_name:
    alone = completions.completion_rows(
      completions.complete(inference.from_folder(adapters[name]), prompts, draws), weights.inputs.tokenizer
    )
    rows_of_adapter = [r for r in rows if r['adapter'] == name]
    assert [r['completion'] for r in rows_of_adapter] == [r['completion'] for r in alone]
    np.testing.assert_allclose([r['logprob'] for r in rows_of_adapter], [r['logprob'] for r in alone], atol=2e-3)
  assert inference.adapters(weights, []) == {'': weights}


@pytest.mark.parametrize('stage', ['one', 'codes'])
def test_adapter_on_a_lora_run_merges_the_adapter_of_the_run(trained_adapters, tmp_path, stage):
  """The adapter of the run is merged into the base, which is dequantized if it was stored in int8 codes."""
  base, adapters = trained_adapters
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
  with_adapter = inference.adapters(weights, [f'two={adapters["two"]}'])['two']
  assert {p.split('/')[2] for p in with_adapter.inputs.model.table if p.startswith('lora/')} == {'q', 'v'}
  merged = weights.inputs.model.merge(weights.params)
  base_params = {k: v for k, v in with_adapter.params.items() if k != 'lora'}
  jax.tree.map(np.testing.assert_array_equal, base_params, merged)
  assert set(with_adapter.params['lora']['layers']) == {'q', 'v'}


@pytest.mark.parametrize('values', [['x'], ['=x'], ['a=x', 'a=y']])
def test_malformed_adapter_flags_are_refused(trained_adapters, values):
  with pytest.raises(InputError, match='--adapter: takes NAME=FOLDER'):
    inference.adapters(inference.from_folder(trained_adapters[0]), values)


def test_sample_and_export_commands_take_adapters(trained_adapters, tmp_path):
  base, adapters = trained_adapters

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
  template = ours.inputs.tokenizer.chat_template  # of the run, not of the base
  assert template == theirs.inputs.tokenizer.chat_template != tokenizer.load(base).chat_template


# -------------------------------------------- a sampler on the base of the policy


def sampler(base, kind, share, targets=''):
  """Returns (policy, engine, bytes that were moved to it) of a stage whose weights the engine has loaded."""
  config = tiny.merged(
    tiny.grpo_config(
      base,
      lora=dict(rank=2) | (dict(targets=targets) if targets else {}),
      rollout=dict(share_base=share, max_new_tokens=8, slots=4),
    ),
    dict(model=dict(quantize=kind)),
  )
  kit = place.place_stage(prepare.prepare_all(config)[0])
  roles, stream, engine = assemble.make_parts(kit, stages.initial_params(kit, None))
  stream.close()
  policy = roles.policy
  noise = np.random.RandomState(0)
  policy.state = policy.state.replace(
    params=jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(np.float32), policy.state.params)
  )
  return policy, engine, engine.load(policy.params, 0)['bytes']


@pytest.mark.parametrize('kind', ['', 'int8', 'nf4'])
def test_a_sampler_shares_the_base(trained_adapters, kind):
  check_shared(trained_adapters[0], kind)


def check_shared(base, kind, targets=''):
  """Asserts that an engine on the shared base holds only adapters of its own and samples as with merged weights."""
  policy, engine, moved = sampler(base, kind, True, targets)
  merged_policy, merged, moved_merged = sampler(base, kind, False, targets)
  base_pointers = tiny.pointers(policy.frozen['params'])
  assert base_pointers <= tiny.pointers(engine.weights)
  assert not base_pointers & tiny.pointers(merged.weights)
  trained_pointers = tiny.pointers(policy.state.params)  # an update donates these arrays
  assert not trained_pointers & tiny.pointers(engine.weights)
  assert moved == sum(x.nbytes for x in jax.tree.leaves(policy.state.params)) < moved_merged / 2
  prompts = [Prompt(i, np.arange(40, 45 + i, dtype=np.int32), '', {}) for i in range(3)]
  shared_rollout, merged_rollout = (
    e(prompts, group_size=2, run_key=on_policy.run_key(0, 1), step=0) for e in (engine, merged)
  )
  np.testing.assert_array_equal(shared_rollout.completions, merged_rollout.completions)
  np.testing.assert_allclose(shared_rollout.logprobs, merged_rollout.logprobs, atol=1e-4)


def test_memory_shared_with_the_sampler_is_predicted_once(trained_adapters):
  """Beyond the arrays of the policy, a sampler that shares the base holds only copies of the trained parameters."""
  sampler_bytes = {}
  for share in (False, True):
    policy, engine, _ = sampler(trained_adapters[0], '', share)
    of_policy = memory.distinct(policy.params)
    of_sampler_alone = {
      key: x for key, x in memory.distinct(engine.described(policy.params)[0]).items() if key not in of_policy
    }
    sampler_bytes[share] = memory.size(of_sampler_alone)
  assert sampler_bytes[True] == memory.size(policy.state.params) < sampler_bytes[False]


SAMPLE_ON_MESHES = """
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
  children.run('-c', SAMPLE_ON_MESHES, base, kind, devices=4, timeout=600)


EXPERTS = dict(
  qwen3_moe=('q|o|experts/(gate|up|down)', dict(experts=Experts(4, 2, 16))),
  # One dense layer and two with experts; attention uses kv_b on both sides, for keys and for values.
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
def test_grpo_learns_with_a_base_shared_by_the_sampler(trained_adapters, tmp_path, kind):
  config = tiny.merged(
    tiny.grpo_config(
      trained_adapters[0],
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


def test_share_base_without_lora_is_refused(trained_adapters):
  with pytest.raises(InputError, match='share_base: is for frozen weights'):
    prepare.prepare_all(tiny.grpo_config(trained_adapters[0], rollout=dict(share_base=True)))
