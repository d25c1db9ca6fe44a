"""Distillation runs (distill, gkd, opd): teachers, the cache of their logits, stages, meshes, bad input, learning."""

import functools
import json
import logging
import math
import pathlib
import sys

import children
import jax
import numpy as np
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost import stages
from jaxpost.algorithms import distill
from jaxpost.errors import InputError
from jaxpost.models import model as model_lib
from jaxpost.monitor import metrics
from jaxpost.rl import reward_metrics
from jaxpost.stage import assemble, frozen_roles, load_weights, place, precompute, prepare, weight_sources
from jaxpost.stage import config as config_lib
from jaxpost.storage import array_cache
from jaxpost.types import Experience, Prompt, Rollout, RowShape

TASK = 'generated:arithmetic:max=99,ops=+'
QUIET = rich.console.Console(quiet=True)


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope='module')
def big(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('models') / 'big', hidden_size=32, num_layers=2)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  return tiny.folder(tmp_path_factory.mktemp('models') / 'small')


def settings(student, teacher, **over):
  return tiny.run_config(
    student,
    **tiny.merged(
      dict(
        algorithm='distill',
        distill=dict(teachers=(teacher,)),
        train=dict(steps=2),
        data=dict(path=f'{TASK},split=train,size=40'),
        eval=dict(data=dict(path=f'{TASK},split=test,size=8')),
      ),
      over,
    ),
  )


def rows_of(workdir, split='train'):
  return [row for row in metrics.read_rows(pathlib.Path(workdir) / 'metrics.jsonl') if row['split'] == split]


def run(config, workdir):
  stages.run(config, workdir, QUIET)
  return rows_of(workdir)


GKD = dict(algorithm='gkd', train=dict(row_length=0), eval=dict(data=dict(path='')))


def first_loss(config) -> float:
  """Returns the loss of the first update; writes nothing."""
  policy, stream = jaxpost.policy_and_stream(config)
  try:
    item = next(stream)
    return float(policy.update(item.updates[0][1])['loss'])
  finally:
    stream.close()


@pytest.mark.parametrize('over', [{}, dict(distill=dict(top_k=9)), dict(**GKD, distill=dict(on_policy=0.5), seed=1)])
def test_run_compiles_all_programs_before_its_first_step(small, big, tmp_path, over, caplog):
  with caplog.at_level(logging.WARNING):
    rows = run(settings(small, big, **tiny.merged(over, dict(train=dict(steps=4)))), tmp_path)
  assert 'compiled' not in caplog.text
  assert all(row['divergence'] > 0 for row in rows)
  if 'algorithm' in over:  # gkd: steps on samples of the student and steps on completions of the data
    assert {row['on_policy'] for row in rows} == {0.0, 1.0}
    assert not any('reward' in row for row in rows)
  else:
    before, after = rows_of(tmp_path, 'eval')
    assert before['loss'] == pytest.approx(before['divergence'])
    assert after['divergence'] < before['divergence']
    assert before['perplexity'] == pytest.approx(math.exp(before['nll']), rel=1e-5)


def test_opd_lowers_the_divergence_without_a_reward(small, big, tmp_path):
  """The run is on-policy distillation alone, with one completion per prompt."""
  opd = dict(GKD, algorithm='opd', rl=dict(reference=big), distill=dict(teachers=()), optim=dict(lr=3e-3))
  opd |= dict(train=dict(steps=12, row_length=0), rollout=dict(prompts=16, group_size=1, max_new_tokens=8))
  rows = run(settings(small, big, **opd), tmp_path / 'a')
  divergence = [row['kl'] for row in rows]
  assert np.mean(divergence[-3:]) < 0.8 * np.mean(divergence[:3])
  assert not any('reward' in row for row in rows)
  # With the student's own weights as the teacher there is no divergence, so no advantage and no gradient.
  self_teaching = settings(small, big, **tiny.merged(opd, dict(rl=dict(reference=small), train=dict(steps=1))))
  (row,) = run(self_teaching, tmp_path / 'b')
  assert row['kl'] == pytest.approx(0, abs=1e-5) and row['grad_norm'] < 1e-4


@pytest.mark.parametrize('beta, over', [(1.0, {}), (0.5, GKD), (0.0, dict(distill=dict(top_k=16)))])
def test_student_equal_to_its_teacher_has_no_divergence_or_gradient(small, tmp_path, over, beta):
  rows = run(settings(small, small, **tiny.merged(over, dict(distill=dict(beta=beta), train=dict(steps=1)))), tmp_path)
  assert rows[0]['divergence'] == pytest.approx(0, abs=1e-6)
  assert rows[0]['grad_norm'] < 1e-4


@pytest.mark.core
def test_first_step_check_needs_a_student_equal_to_its_teacher(small, big):
  same = config_lib.parse(settings(small, small))['distill']
  distill.check_first_step({'divergence': 1e-7}, same)
  with pytest.raises(AssertionError, match='divergence is 0.1'):
    distill.check_first_step({'divergence': 0.1}, same)
  for fields in (dict(distill=dict(teachers=(big,))), dict(init_from=big), dict(distill=dict(teachers=(small, big)))):
    distill.check_first_step({'divergence': 0.1}, config_lib.parse(settings(small, small, **fields))['distill'])
  for fields in (dict(model=dict(path=small, quantize='nf4'), lora=dict(rank=2)), dict(lora=dict(path=big))):
    config = tiny.merged(settings(small, small), fields)  # the teacher is the plain model, without codes or adapter
    distill.check_first_step({'divergence': 0.1}, config_lib.parse(config)['distill'])


def test_gkd_with_on_policy_0_equals_distill(small, big):
  """Both train on the same rows."""
  over = dict(
    data=dict(path=f'{TASK},split=train,size=4', packing=False), distill=dict(nll_coef=0.5), train=dict(batch_size=4)
  )
  ours = settings(small, big, **tiny.merged(over, GKD), rollout=dict(prompts=4, group_size=2, max_new_tokens=8))
  ours['distill']['on_policy'] = 0.0
  assert first_loss(ours) == pytest.approx(first_loss(settings(small, big, **over)), rel=1e-6)


def test_share_of_on_policy_steps_is_drawn_from_the_seed():
  from jaxpost.rl.demonstrations import DemonstrationSampler

  steps = [[DemonstrationSampler(None, None, 0.3, seed, 4).from_data(n) for n in range(2000)] for seed in (0, 0, 1)]
  assert steps[0] == steps[1] != steps[2]
  assert np.mean(steps[0]) == pytest.approx(0.3, abs=0.03)


def test_completions_from_data_report_no_staleness():
  """No weights sampled these completions. Their staleness was once reported as the number of the step."""
  over = dict(algorithm='gkd', distill=dict(teachers=('x',), on_policy=0.5), rollout=dict(staleness=1))
  config = config_lib.resolve(next(iter(config_lib.parse(over).values())), distill.GKD.defaults)
  no_logprobs = np.zeros((2, 3), np.float32)
  prompts = tuple(Prompt(i, np.ones(1, np.int32), '', {}) for i in range(2))
  lengths, finished = np.full(2, 3, np.int32), np.ones(2, bool)
  rollout = Rollout(
    prompts, no_logprobs.astype(np.int32), lengths, no_logprobs, no_logprobs, finished, step=50, version=49
  )
  for from_data, expected in ((False, {'staleness/mean': 1, 'staleness/max': 1}), (True, {})):
    experience = Experience(rollout.replace(from_data=from_data), np.zeros(2), no_logprobs + 1, {}, step=50)
    step_metrics = reward_metrics.step_metrics(experience, RowShape(2, 4), config)
    assert {name: value for name, value in step_metrics.items() if name.startswith('staleness/')} == expected


def test_answer_without_trained_tokens_is_refused():
  from jaxpost.data import tokenizer
  from jaxpost.rl import demonstrations

  messages = [dict(role='user', content='a'), dict(role='assistant', content='b', weight=0)]
  with pytest.raises(InputError, match='row 3: no token of its answer is trained'):
    demonstrations.make_example(tokenizer.load('bytes'), dict(messages=messages), 'row 3')


def test_answer_of_a_chat_after_a_prompt_that_is_text_is_refused():
  """UltraChat has both columns. Steps on samples would continue the bare text, without the chat template."""
  from jaxpost.data import sources, tokenizer
  from jaxpost.rl import demonstrations

  row = dict(prompt='a', messages=[dict(role='user', content='a'), dict(role='assistant', content='b')])
  check = functools.partial(demonstrations.check, tokenizer.load('bytes'), limit=9)
  with pytest.raises(InputError, match=r'x\[1\]: prompt: is text, and messages a chat.*columns=asked=prompt'):
    check(sources.read('x', fake_rows=[dict(messages=row['messages']), row]))
  check(sources.read('x', columns='asked=prompt', fake_rows=[row]))


@pytest.fixture(scope='module')
def plain_loss(small, big):
  """Returns the loss of the first step with one teacher and otherwise default options."""
  return first_loss(settings(small, big))


@pytest.mark.parametrize(
  'fields, same', [(dict(top_k=2), False), (dict(top_k=259), True), (dict(teachers=('big', 'small')), False)]
)
def test_top_k_and_a_second_teacher_change_the_loss(small, big, plain_loss, fields, same):
  """With top_k=259, of all tokens, the loss stays, as the cache holds the whole distribution."""
  if 'teachers' in fields:
    fields = dict(teachers=(big, small))
  loss = first_loss(settings(small, big, distill=fields))
  assert (loss == pytest.approx(plain_loss, rel=1e-5)) == same


def test_cached_and_full_divergence_ignore_tokens_that_the_teacher_lacks(small, big, tmp_path):
  """The student's vocabulary is padded to 320; the padding counts in neither divergence."""
  student = tiny.folder(tmp_path / 'student', vocab_size=320)
  full, cached = (first_loss(settings(student, big, distill=dict(top_k=k))) for k in (0, 259))
  assert cached == pytest.approx(full, rel=1e-5)


@pytest.mark.parametrize('over', [dict(distill=dict(top_k=9)), dict(**GKD, seed=1, distill=dict(on_policy=0.5))])
def test_resume_is_bitwise(small, big, tmp_path, over):
  def config(steps):
    return settings(small, big, **tiny.merged(over, dict(train=dict(steps=steps))))

  uninterrupted = run(config(4), tmp_path / 'whole')
  run(config(2), tmp_path / 'parts')
  resumed = run(config(4), tmp_path / 'parts')

  def without_timing(row):
    return {k: v for k, v in row.items() if not (k.startswith(('time/', 'memory/')) or k.endswith('_per_s'))}

  assert [without_timing(r) for r in uninterrupted] == [without_timing(r) for r in resumed]
  ends = []
  for name in ('whole', 'parts'):
    source = weight_sources.find(str(tmp_path / name), 'end', {})
    ends.append(load_weights.load(source, model_lib.build(source.config), tiny.one_device(), 'float32'))
  jax.tree.map(np.testing.assert_array_equal, *ends)


# ----------------------------------------------------------------- the cache


def count_teachers(monkeypatch):
  """Returns a list to which the name of each teacher is appended when it is put on the devices."""
  loaded, make_frozen = [], frozen_roles.make_frozen

  def make_and_record(kit, name, *args):
    loaded.append(name)
    return make_frozen(kit, name, *args)

  monkeypatch.setattr(frozen_roles, 'make_frozen', make_and_record)
  return loaded


def test_second_run_reuses_the_cache_of_teacher_logits(small, big, tmp_path, monkeypatch):
  loaded_teachers = count_teachers(monkeypatch)
  config = settings(small, big, distill=dict(top_k=5))
  first = run(config, tmp_path)
  assert loaded_teachers == ['teacher_0']  # once for training and evaluation
  files = sorted((tmp_path / 'cache').rglob('*.npy'))
  assert len(files) == 6
  for name in ('checkpoints', 'metrics.jsonl'):
    (tmp_path / name).rename(tmp_path / f'old_{name}')
  config['optim']['lr'] = 1e-3  # another run in the same folder
  second = run(config, tmp_path)
  assert loaded_teachers == ['teacher_0'] and first[0]['loss'] == second[0]['loss']


@pytest.fixture(scope='module')
def paths(big, small):
  """Returns find(config, workdir) -> the paths at which training and evaluation would cache their arrays."""

  def find(config, workdir):
    seen = []

    def record(path, make):
      del make
      seen.append(path)
      return {}

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(precompute, 'load_or_make', record)
      assemble.make_parts(
        kit := place.place_stage(prepare.prepare_all(config)[0]), stages.initial_params(kit, None), workdir
      )
    return seen

  return find


@pytest.mark.parametrize(
  'over',
  [
    dict(distill=dict(temperature=2.0)),
    dict(distill=dict(top_k=4)),
    dict(data=dict(train_on='all')),
    dict(model=dict(dtype='bfloat16')),
    dict(train=dict(row_length=48)),
    'weights',
    'data',
  ],
)
def test_cache_path_changes_with_teacher_data_and_settings(small, tmp_path, paths, over):
  shape = dict(hidden_size=32, num_layers=2)
  config = settings(small, tiny.folder(tmp_path / 'teacher', **shape), distill=dict(top_k=5))
  before = paths(config, tmp_path)
  assert len(set(before)) == 2 and before == paths(config, tmp_path)
  if over == 'weights':
    tiny.folder(tmp_path / 'teacher', initializer_range=0.1, **shape)
  elif over == 'data':
    config['data']['path'] = f'{TASK},split=train,size=39'
  else:
    config = tiny.merged(config, over)
  after = paths(config, tmp_path)
  assert before[0] != after[0]
  assert (before[1] == after[1]) == (over == 'data')


@pytest.mark.parametrize('harm', ['none', 'truncated', 'unfinished'])
def test_damaged_array_cache_is_made_again(tmp_path, harm):
  calls = []

  def make():
    calls.append(1)
    return {'ids': np.arange(12).reshape(4, 3), 'p': np.ones(4, np.float32)}

  array_cache.load_or_make(tmp_path / 'x', make)
  file = tmp_path / 'x' / 'ids.npy'
  if harm == 'truncated':
    file.write_bytes(file.read_bytes()[:-4])
  elif harm == 'unfinished':
    (tmp_path / 'x' / 'index.json').unlink()
  loaded = array_cache.load_or_make(tmp_path / 'x', make)
  assert len(calls) == 1 + (harm != 'none')
  jax.tree.map(np.testing.assert_array_equal, dict(loaded), make())
  names = sorted(f.name for f in (tmp_path / 'x').iterdir())
  assert names == ['ids.npy', 'index.json', 'p.npy']  # no temporary files are left


# ------------------------------------------------------------------- stages


def test_earlier_stage_can_be_the_teacher_of_a_later_stage(small, big, tmp_path):
  """Stage two starts from the weights of its teacher, so its divergence is 0; stage three starts elsewhere."""
  config = settings(small, big, stages=('one', 'two', 'three'))
  config['eval']['data']['path'] = ''
  config |= dict(
    one=dict(train=dict(steps=2)),
    two=dict(train=dict(steps=1), distill=dict(teachers=('stage:one',))),
    three=dict(train=dict(steps=1), init_from=big, distill=dict(teachers=('stage:one',), top_k=4)),
  )
  rows = run(config, tmp_path)
  assert [r['stage'] for r in rows] == ['one', 'one', 'two', 'three']
  assert rows[0]['divergence'] > 1e-3 and rows[3]['divergence'] > 1e-3
  assert rows[2]['divergence'] == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
  'over, message',
  [
    (dict(distill=dict(teachers=())), 'distill.teachers: is empty'),
    (dict(distill=dict(teachers=('',))), r'teachers\[0\]: is empty'),
    (dict(distill=dict(teachers=('/nowhere',))), r'teachers\[0\]: /nowhere does not exist'),
    (dict(distill=dict(teachers=('stage:none',))), 'is no stage before this'),
    (dict(distill=dict(weights=(1.0, 2.0))), '2 weights for 1 teachers'),
    (dict(distill=dict(weights=(0.0,))), 'not all 0'),
    (dict(distill=dict(top_k=260)), 'top_k: 260 of 259 tokens'),
    (dict(distill=dict(on_policy=0.5)), 'set config.algorithm=gkd'),
    (dict(distill=dict(top_k=4), data=dict(streaming=True)), 'streaming'),
    (dict(**GKD, distill=dict(top_k=4)), 'set it to 0, or config.algorithm'),
    (dict(**GKD, distill=dict(nll_coef=1.0)), 'nll_coef: is for completions'),
    (dict(**GKD, rl=dict(kl_coef=0.1)), 'rl.kl_coef: gkd would ignore'),
    (tiny.merged(GKD, dict(eval=dict(samples=1, data=dict(path=TASK)))), 'config.reward: is empty'),
  ],
)
def test_bad_distill_config_is_refused(small, big, over, message):
  with pytest.raises(InputError, match=message) as error:
    prepare.prepare_all(settings(small, big, **over))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'fields, message',
  [(dict(vocab_size=200), 'vocabulary of 200, less than the 259 tokens'), (dict(num_labels=1), 'is a reward model')],
)
def test_unsuitable_teachers_are_refused(small, tmp_path, fields, message):
  wrong = tiny.folder(tmp_path / 'wrong', **fields)
  with pytest.raises(InputError, match=message):
    prepare.prepare_all(settings(small, wrong))


def test_teacher_with_another_tokenizer_is_refused(small, big, tmp_path):
  from jaxpost.data import tokenizer

  path = pathlib.Path(tiny.folder(tmp_path / 'other'))
  tokenizer.load('bytes').save(path)
  prepare.prepare_all(settings(small, str(path)))  # a copy of the same tokenizer is accepted
  file = path / 'tokenizer.json'
  raw = json.loads(file.read_text())
  vocab = raw['model']['vocab']
  vocab['1'], vocab['2'] = vocab['2'], vocab['1']
  file.write_text(json.dumps(raw))
  with pytest.raises(InputError, match='another tokenizer than bytes'):
    prepare.prepare_all(settings(small, str(path)))


def test_rows_without_completion_are_refused_if_gkd_trains_on_data(small, big, tmp_path):
  file = tmp_path / 'prompts.jsonl'
  file.write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
  over = tiny.merged(GKD, dict(data=dict(path=str(file))))
  prepare.prepare_all(settings(small, big, **over))
  with pytest.raises(InputError, match='prompts.jsonl:1: needs the columns'):
    prepare.prepare_all(settings(small, big, **tiny.merged(over, dict(distill=dict(on_policy=0.5)))))


@pytest.mark.parametrize('vocab', [270, 400])
def test_student_and_teacher_may_have_vocabularies_of_different_size(small, tmp_path, vocab):
  """The smaller vocabulary counts, whether it is the one of the student or of the teacher, padded or not."""
  other = tiny.folder(tmp_path / 'other', hidden_size=32, vocab_size=vocab)
  wider, narrower = (first_loss(settings(*pair)) for pair in ((small, other), (other, small)))
  assert 0 < wider < 1 and 0 < narrower < 1


# ----------------------------------------------------------------- meshes

MESHES = {'one': ('data=1', ''), 'both': ('fsdp=4,tensor=2', 'data=2,tensor=4'), 'wide': ('fsdp=2,tensor=4', 'data=8')}
KINDS = {'whole': {}, 'topk': dict(distill=dict(top_k=6))}


def test_meshes_of_student_and_teacher_match_one_device(tmp_path):
  figures = measure(tmp_path / 'one', ['one']) | children.printed(__file__, str(tmp_path), devices=8, timeout=500)
  assert len(figures) == len(KINDS) * len(MESHES)
  for kind in KINDS:
    for name in MESHES:
      assert figures[f'{kind} {name}'] == pytest.approx(figures[f'{kind} one'], rel=2e-5), (kind, name)
  assert figures['whole one'] != figures['topk one']


def measure(folder, names) -> dict:
  """Returns {'kind mesh': [loss, norm of the gradient]} of the first step."""
  shape = dict(num_heads=4, num_kv_heads=4)
  small, big = (
    tiny.folder(folder / 'small', **shape),
    tiny.folder(folder / 'big', hidden_size=32, num_layers=2, **shape),
  )
  figures = {}
  for kind, over in KINDS.items():
    for name in names:
      train_mesh, score_mesh = MESHES[name]
      policy, stream = jaxpost.policy_and_stream(
        settings(
          small,
          big,
          **(tiny.merged(over, dict(mesh=dict(train=train_mesh, score=score_mesh), train=dict(batch_size=4)))),
        )
      )
      step_metrics = policy.update(next(stream).updates[0][1])
      figures[f'{kind} {name}'] = [float(step_metrics['loss']), float(step_metrics['grad_norm'])]
      stream.close()
  return figures


# --------------------------------------------------------------- learning

EASY = 'generated:arithmetic:max=9,ops=+,correct=1'


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
  """The folder of a run that learned sums of single digits."""
  folder = tmp_path_factory.mktemp('teacher')
  start = tiny.folder(
    folder / 'start',
    hidden_size=64,
    num_layers=2,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=4,
    initializer_range=0.05,
  )
  run(lesson(start, algorithm='sft', train=dict(steps=150)), folder / 'run')
  return str(folder / 'run')


def lesson(start, **over):
  return tiny.run_config(
    start,
    **tiny.merged(
      dict(
        data=dict(path=f'{EASY},split=train'),
        optim=dict(lr=5e-3, b2=0.98),
        train=dict(steps=80, batch_size=4, row_length=128),
        eval=dict(size=64, data=dict(path=f'{EASY},split=test')),
        rollout=dict(prompts=16, group_size=1, max_new_tokens=6),
      ),
      over,
    ),
  )


@pytest.fixture(scope='module')
def pupil(tmp_path_factory):
  return tiny.folder(
    tmp_path_factory.mktemp('pupil') / 'model', hidden_size=32, intermediate_size=64, initializer_range=0.05
  )


@pytest.mark.parametrize('fields', [dict(beta=0.0), dict(beta=0.5), dict(beta=1.0), dict(beta=0.0, top_k=8)])
def test_distill_halves_the_divergence_on_held_out_rows(teacher, pupil, tmp_path, fields):
  """The divergence is the one that is trained; neither teacher nor student has seen the sums."""
  run(lesson(pupil, algorithm='distill', distill=dict(teachers=(teacher,), **fields)), tmp_path)
  before, after = (r['divergence'] for r in rows_of(tmp_path, 'eval'))
  print(f'distill {fields}: {before:.4f} -> {after:.4f}')
  assert after < 0.5 * before


def test_gkd_halves_the_divergence_on_held_out_rows(teacher, pupil, tmp_path):
  def divergence(name, **over):
    run(
      lesson(
        pupil, algorithm='distill', distill=dict(teachers=(teacher,)), train=dict(steps=1), optim=dict(lr=0.0), **over
      ),
      tmp_path / name,
    )
    return rows_of(tmp_path / name, 'eval')[0]['divergence']

  run(
    lesson(pupil, algorithm='gkd', train=dict(row_length=0), distill=dict(teachers=(teacher,), on_policy=0.5)),
    tmp_path / 'gkd',
  )
  before, after = (divergence('before'), divergence('after', init_from=f'{tmp_path}/gkd'))
  print(f'gkd: {before:.4f} -> {after:.4f}')
  assert after < 0.5 * before


if __name__ == '__main__':
  print(json.dumps(measure(pathlib.Path(sys.argv[1]) / 'many', [n for n in MESHES if n != 'one'])))
