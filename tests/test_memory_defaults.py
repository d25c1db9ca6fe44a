"""Defaults by device memory: recipes fit the devices that they are for; others get smaller settings or advice."""

import dataclasses
import functools
import importlib
import inspect
import io
import json
import pathlib

import jax
import pytest
import rich.console
import tiny

import jaxpost
from jaxpost import stages
from jaxpost.errors import InputError
from jaxpost.hardware.chips import CHIPS, Chip
from jaxpost.matmul import compute_for
from jaxpost.planning import arithmetic, auto, defaults, dry_run, machines, nearest, search
from jaxpost.planning import stage as plan_stage
from jaxpost.programs.compile import Ledger, Program, TooLargeError
from jaxpost.stage import batch_shape, precompile, prepare

CLONE = pathlib.Path(__file__).resolve().parents[1]
GIB = 2**30
NOT_COMPILED = (  # an error of libtpu 0.0.42
  'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.23G) exceeds '
  'available HBM (15.75G).'
)
CPU = ('quickstart', 'text_game')
FOR_EIGHT = ('glm_moe_gsm8k', 'qwen3_5_moe_gsm8k')  # their meshes have eight devices
RECIPES = sorted(p.stem for p in CLONE.glob('configs/*.py') if p.stem not in ('__init__', *CPU, *FOR_EIGHT))
DEVICES = {
  'H100': ('h100', (1, 1, 1)),
  'A100': ('a100_80gb', (1, 1, 1)),
  'A100-40': ('a100', (1, 1, 1)),
  'L4': ('l4', (1, 1, 1)),
  '8xH100': ('h100', (1, 1, 8)),
  'v5e-8': ('v5e', (2, 4)),
  'v6e-8': ('v6e', (2, 4)),
  'v5p-8': ('v5p', (2, 2, 1)),
}
# (recipe, device) whose state alone, or state and one row, takes more than the memory of the device
TOO_LARGE = {(name, 'L4') for name in ('lfm2_gsm8k', 'ppo_gsm8k', 'sft_rm_ppo', 'tools_gsm8k')}
TOO_LARGE |= {('tools_gsm8k', 'A100-40')}
SMALLEST = {'model.remat': 'full', 'train.micro_batch_size': 1}


def machine(device, **chip):
  name, size = DEVICES[device]
  return machines.Topology(device, name, dataclasses.replace(CHIPS[name], **chip), size)


@functools.cache
def planned(name, arg=None):
  """Returns the stages of a recipe, prepared without weights or data."""
  return dry_run.prepare_all(prepare.as_dict(importlib.import_module(f'configs.{name}').get_config(arg)))


def stage(name, arg=None, **settings):
  """Returns the only stage of a recipe, with settings written section__field=value."""
  (p,) = planned(name, arg)
  return plan_stage.vary(p, {k.replace('__', '.'): v for k, v in settings.items()})


def needed(p, where, chosen):
  """Returns (bytes of an update, bytes while sampling) of a stage on a machine with the chosen settings."""
  needs = defaults.room(p, where).needs(p, chosen)
  return needs.updating, needs.sampling


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_fits_every_device_but_those_known_to_be_too_small(name):
  """The recipe is taken as it is. All docstrings name devices of 80 GB."""
  assert '80 GB' in ' '.join(importlib.import_module(f'configs.{name}').__doc__.split())
  too_large = set()
  for device in DEVICES:
    where = machine(device)
    if any(max(needed(p, where, defaults.choose(p, where))) > 0.9 * where.memory for p in planned(name)):
      too_large.add((name, device))
  assert too_large == {x for x in TOO_LARGE if x[0] == name}


def test_recipe_for_eight_devices_fits_eight_h100_but_not_v5e_8():
  for name in FOR_EIGHT:
    for device, fits in (('8xH100', True), ('v5e-8', False)):
      where = machine(device)
      needs = [max(needed(p, where, defaults.choose(p, where))) for p in planned(name)]
      assert [x <= 0.9 * where.memory for x in needs] == [fits] * 2, (name, device)


def test_settings_that_fit_are_not_changed():
  for device in ('H100', 'v5p-8', '8xH100'):
    assert defaults.choose(stage('sft_gsm8k'), machine(device)) == {}
  assert defaults.choose(stage('sft_gsm8k'), machines.parse('cpu')) == {}
  assert defaults.choose(stage('sft_gsm8k'), machine('L4', memory=0.0)) == {}


def test_less_memory_never_means_more_slots_or_rows():
  """Choices are compared from 80 to 20 GB; at the end there are fewer sequences and rows at a time than by default."""
  p, previous = stage('grpo_gsm8k'), (10**9, 10**9)
  for gib in (80, 40, 24, 20):
    where = machine('H100', memory=gib * GIB)
    chosen = defaults.choose(p, where)
    assert max(needed(p, where, chosen)) <= 0.9 * 0.92 * gib * GIB
    current = chosen.get('rollout.slots', 256), chosen.get('train.micro_batch_size', 10)
    assert current <= previous and current[1] <= previous[1]
    previous = current
  assert previous < (256, 10)


def test_full_remat_is_chosen_only_where_it_is_needed():
  """The memory of the device lies between what one row takes with full recomputation, and without it."""
  p = stage('sft_gsm8k', 'model=qwen3_1_7b', train__batch_size=1, train__row_length=16384, eval__samples=0)
  with_dots, (full_update, _) = (needed(p, machine('H100'), {'model.remat': remat}) for remat in ('dots', 'full'))
  assert with_dots[0] > 1.2 * full_update
  memory = (with_dots[0] + full_update) / 2 / 0.9 / 0.92
  assert defaults.choose(p, machine('H100', memory=memory)) == {'model.remat': 'full'}
  assert defaults.choose(p, machine('H100', memory=with_dots[0] / 0.8)) == {}


def test_memory_estimate_of_a_t4_is_of_attention_by_xla():
  """XLA compiles no Triton for a T4: attention weights take memory, and decoding copies the cache that it reads."""
  t4 = machines.Topology('T4', 't4', CHIPS['t4'], (1, 1, 1))
  with_kernels = dataclasses.replace(t4, chip=dataclasses.replace(t4.chip, bfloat16=True))
  p = stage('grpo_gsm8k', model__dtype='float16', model__remat='dots', rollout__slots=32)
  by_name = plan_stage.vary(p, {'model.attention': 'chunked'})
  of_t4, kernels, xla = (
    defaults.room(x, where).needs(x) for x, where in ((p, t4), (p, with_kernels), (by_name, with_kernels))
  )
  assert of_t4 == xla and of_t4.updating != kernels.updating and of_t4.sampling > 1.1 * kernels.sampling


def test_memory_estimate_of_split_rows_on_gpus_is_of_attention_by_xla():
  """The Triton kernel needs whole rows; see `attention_kernels.refused`."""
  p = stage('sft_text', train__row_length=16384, train__batch_size=8, model__remat='dots')
  whole = dict(data=1, fsdp=8, expert=1, context=1, tensor=1)
  split = dict(data=1, fsdp=4, expert=1, context=2, tensor=1)
  by_name = plan_stage.vary(p, {'model.attention': 'chunked'})
  for sizes, same in (whole, False), (split, True):
    default, xla = (arithmetic.estimate(x.inputs, machine('8xH100'), sizes, whole).updating for x in (p, by_name))
    assert (default == xla) is same


def test_fields_that_a_config_sets_are_not_changed():
  all_set = stage('dpo_hh', model__remat='dots', train__micro_batch_size=2, rollout__slots=100, eval__samples=1)
  assert defaults.choose(all_set, machine('L4')) == {}
  small = machine('L4', memory=18 * GIB)
  assert set(defaults.choose(stage('dpo_hh', model__remat='full'), small)) == {'train.micro_batch_size'}
  assert defaults.choose(stage('dpo_hh', model__remat='none'), machine('L4')) == {}


def test_slots_of_evaluation_are_chosen_beside_the_optimizer():
  """SFT samples for its evaluation only, while the optimizer states stay on the device."""
  chosen = defaults.choose(stage('sft_gsm8k'), machine('L4'))
  assert chosen['rollout.slots'] < 256
  assert 'rollout.slots' not in defaults.choose(stage('sft_gsm8k', eval__samples=0), machine('L4'))


@pytest.mark.parametrize('prompts, group', [(128, 8), (256, 4), (512, 1)])
def test_more_prompts_a_step_do_not_reduce_slots(prompts, group):
  """Waiting prompts hold no prefix until slots are free, so that steps of many prompts keep at least 64 slots."""
  settings = dict(rollout__max_prompt_length=1024, rollout__prompts=prompts, rollout__group_size=group)
  chosen = defaults.choose(stage('grpo_gsm8k', 'model=qwen3_1_7b', **settings), machine('H100'))
  assert chosen['rollout.slots'] >= 64 and 'rollout.offload' not in chosen


def test_sampler_without_an_optimizer_beside_it_gets_more_slots():
  where = machines.Topology('two', 'a100', CHIPS['a100'], (1, 1, 2))
  own_devices = defaults.choose(stage('ppo_gsm8k', mesh__rollout_devices=1), where)
  shared = defaults.choose(stage('ppo_gsm8k'), machine('A100-40'))
  assert own_devices.get('rollout.slots', 256) > shared['rollout.slots']
  offloaded = defaults.choose(stage('ppo_gsm8k', rollout__offload=True), machine('A100-40'))
  assert offloaded.get('rollout.slots', 256) > shared['rollout.slots']


def test_chosen_micro_batch_divides_the_batch():
  for gib in range(12, 40, 4):
    chosen = defaults.choose(stage('dpo_hh'), machine('H100', memory=gib * GIB))
    assert 32 % chosen['train.micro_batch_size'] == 0


def test_unknown_gpu_gets_settings_by_its_memory_alone():
  """Its speed is unknown, but speeds of settings are only compared with each other."""
  where = machines.Topology('1 x RTX', 'gpu', Chip('NVIDIA RTX', 0.0, 24e9), (1,), owned=tuple(jax.devices()[:1]))
  chosen = defaults.choose(stage('grpo_gsm8k'), where)
  assert chosen['rollout.slots'] < 256 and max(needed(stage('grpo_gsm8k'), machine('L4'), chosen)) < 0.9 * 24e9


def test_stage_that_cannot_fit_gets_the_smallest_settings():
  p = stage('tools_gsm8k')
  chosen = defaults.choose(p, machine('L4', memory=8e9))
  assert chosen == SMALLEST | {'rollout.slots': 2, 'rollout.offload': True}


def test_run_chooses_settings_by_memory_and_refuses_what_cannot_fit(monkeypatch, tmp_path):
  """The CPU is taken for a GPU with little memory."""
  model = tiny.folder(tmp_path / 'model')
  config = tiny.grpo_config(model, train=dict(steps=1), rollout=dict(prompts=4, group_size=8))
  (p,) = stages.with_meshes(prepare.prepare_all(prepare.as_dict(config)), None)
  where = machines.Topology('toy', 'gpu', Chip('toy', 1e12, 1e12, 1e12), (1,), owned=tuple(jax.devices()[:1]))
  low, high = (
    max(needed(p, where, f)) for f in ({'rollout.slots': 8, 'train.micro_batch_size': 1}, {'rollout.slots': 32})
  )
  held = defaults.room(p, where).needs(p, {'model.remat': 'full'}).held
  p.close()
  small = dataclasses.replace(where, chip=dataclasses.replace(where.chip, memory=(low + high) / 2 / 0.9))
  monkeypatch.setattr(machines, 'here', lambda devices: small)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  jaxpost.run(config, tmp_path / 'run')
  (plan,) = json.loads((tmp_path / 'run/plan.json').read_text())
  chosen = {k: v for k, v in plan['choices'].items() if '(memory: else ' in v}
  assert chosen.keys() & {'rollout.slots', 'train.micro_batch_size'}
  if 'rollout.slots' in chosen:
    assert int(chosen['rollout.slots'].split()[0]) < 32
  # The size of weights and moments is exact: a device with less memory is refused before they are read.
  small = dataclasses.replace(where, chip=dataclasses.replace(where.chip, memory=float(held - 1)))
  with pytest.raises(InputError, match='weights and optimizer states take .*; nothing fits up to 128 times'):
    jaxpost.run(config, tmp_path / 'refused')
  assert not (tmp_path / 'refused/plan.json').exists()
  # Other needs are refused once the compiler has counted them.
  monkeypatch.setattr(machines, 'here', lambda devices: where)
  check = precompile.check_fits
  monkeypatch.setattr(precompile, 'check_fits', lambda *_: check({'update': 2**50}, Device(2**20)))
  with pytest.raises(InputError, match=r'grpo: .* needs .* GiB of memory, of which a device \(small\) has 0.0; '):
    jaxpost.run(config, tmp_path / 'run2')
  assert not (tmp_path / 'run2/metrics.jsonl').exists()
  # So are programs so large that the compiler fails.
  monkeypatch.setattr(precompile, 'check_fits', lambda predicted, device: None)
  refuse_update(monkeypatch, int(17.23 * GIB))
  with pytest.raises(InputError, match='grpo: update needs 17.2 GiB of memory, more than XLA compiles for; '):
    jaxpost.run(config, tmp_path / 'run3')


def test_run_chooses_again_where_a_program_is_larger_than_was_estimated(monkeypatch, tmp_path, capsys):
  """The CPU is taken for a GPU. Nothing of a stage that was too large stays in memory."""
  model = tiny.folder(tmp_path / 'model')
  lora = dict(rank=2)  # the weights under adapters are not donated
  config = tiny.grpo_config(model, train=dict(steps=1), rollout=dict(prompts=4, group_size=8), lora=lora)
  counted = precompile.memory_of
  slots, in_memory = [], []

  def memory_of(placed, *args):
    slots.append(placed.config.rollout.slots or 32)
    in_memory.append(sum(x.nbytes for x in jax.live_arrays()))
    if slots[-1] > 8:
      raise TooLargeError('generate', int(1.2 * limit), '')
    return counted(placed, *args)

  where = machines.Topology('toy', 'gpu', Chip('toy', 1e12, 1e12, 1e12), (1,), owned=tuple(jax.devices()[:1]))
  (p,) = stages.with_meshes(prepare.prepare_all(prepare.as_dict(config)), None)
  limit = needed(p, where, {'rollout.slots': 32})[1] / 0.9
  p.close()
  large = dataclasses.replace(where, chip=dataclasses.replace(where.chip, memory=1.01 * limit))
  monkeypatch.setattr(machines, 'here', lambda devices: large)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(precompile, 'memory_of', memory_of)
  jaxpost.run(config, tmp_path / 'chosen_again')
  assert slots[0] == 32 and slots[-1] <= 8 and slots == sorted(set(slots), reverse=True)
  assert max(in_memory) == in_memory[0], in_memory
  (plan,) = json.loads((tmp_path / 'chosen_again/plan.json').read_text())
  assert plan['choices']['rollout.slots'].startswith(f'{slots[-1]} (memory: else ')
  assert f'config.rollout.slots={slots[-1]}' in capsys.readouterr().out
  assert len([x for x in plan['programs'] if x['program'] == 'generate']) == 1


class Device:
  """A device that reports this memory, or none if `limit` is None."""

  device_kind = 'small'

  def __init__(self, limit):
    self.memory_stats = lambda: limit and dict(bytes_limit=limit)


def test_programs_that_do_not_fit_are_refused_with_the_nearest_settings_that_do():
  """Where the config sets the number of slots, no other is chosen."""
  p, where = stage('grpo_gsm8k', rollout__slots=256), machine('A100')
  bytes_of_programs = dict(update=2**30, generate=100 * 2**30, peak=100 * 2**30)
  precompile.check_fits(bytes_of_programs, Device(None))  # as CPUs, which do not report their memory
  precompile.check_fits(bytes_of_programs, Device(100 * 2**30))
  with pytest.raises(TooLargeError) as error:
    precompile.check_fits(bytes_of_programs, Device(70 * 2**30))
  too_large = error.value
  assert (too_large.program, too_large.needed) == ('generate', 100 * 2**30)
  with pytest.raises(InputError) as error:
    auto._smaller(p, where, str, too_large)
  assert str(error.value) == (
    'grpo: generate needs 100.0 GiB of memory, of which a device (small) has 70.0; the nearest that fits, by '
    'arithmetic: --config.rollout.slots=128'
  )
  with pytest.raises(InputError, match='take config.model.remat=full'):
    auto._smaller(p, machine('A100', memory=0.0), str, too_large)


def test_settings_are_chosen_again_by_what_the_compiler_counts():
  """Each choice needs less than the one before it, and what one program needed is known while another is too large."""
  p, where = stage('grpo_gsm8k'), machine('A100')
  (updating, sampling), notes = needed(p, where, {}), []
  for program in ('generate', 'update', 'generate', 'update'):
    p = auto._smaller(p, where, notes.append, TooLargeError(program, 0, ', which is too much'))
    before = updating, sampling
    updating, sampling = needed(dataclasses.replace(p, memory_scale=(1.0, 1.0)), where, {})
    assert (updating < before[0], sampling < before[1]) == (program == 'update', program == 'generate')
  assert len(notes) == 8
  assert notes[0] == 'grpo: generate needs 0.0 GiB of memory, which is too much; smaller settings are chosen'


def test_a_program_of_the_sampler_of_a_stage_that_samples_nothing_counts_as_an_update():
  """The estimate of its sampling is 0, which could not be scaled."""
  p, where = stage('sft_gsm8k', eval__samples=0), machine('A100')
  assert defaults.room(p, where).needs(p).sampling == 0
  updating, sampling = nearest.counted(p, where, TooLargeError('reshard', 2**40, '')).memory_scale
  assert updating > 1 and sampling == 1


def refuse_update(monkeypatch, needed):
  """Lets the compiler refuse updates, as that for TPUs does if they need too much memory."""
  compile_any = Program.compile

  def compile_others(program, *args):
    if program.name == 'update':
      raise TooLargeError('update', needed, ', more than XLA compiles for')
    return compile_any(program, *args)

  monkeypatch.setattr(Program, 'compile', compile_others)


def test_program_that_xla_does_not_compile_for_lack_of_memory_is_too_large(monkeypatch):
  message = NOT_COMPILED

  def not_compiled(lowered, options):
    raise jax.errors.JaxRuntimeError(message)

  monkeypatch.setattr(jax.stages.Lowered, 'compile', not_compiled)
  program = Program('update', lambda x: x + 1, Ledger(), None)
  with pytest.raises(TooLargeError, match='update needs 17.2 GiB of memory, more than XLA compiles for') as error:
    program(jax.numpy.ones(3))
  assert (error.value.program, error.value.needed) == ('update', int(17.23 * GIB))
  message = 'INTERNAL: another error'
  with pytest.raises(jax.errors.JaxRuntimeError, match='another error'):
    program(jax.numpy.ones(3))


def test_plan_of_a_program_that_xla_does_not_compile_names_the_nearest_settings_that_fit(monkeypatch):
  refuse_update(monkeypatch, int(172.3 * GIB))
  monkeypatch.setattr(machines, 'devices', lambda topology: jax.devices()[: topology.chips])
  where = machines.parse('v5e:1x1')
  p = defaults.fitted(stage('sft_gsm8k', model__dtype='bfloat16'), where)
  options = plan_stage.Options(where, ('update',))
  with pytest.raises(InputError, match='sft: update needs 172.3 GiB of memory, .*; the nearest that fits'):
    auto.planned(p, options)
  assert auto._plan(p, {}, where, 'update') == {'fits': False}


def test_optimizer_is_offloaded_before_fewer_than_8_slots_are_chosen():
  """It is offloaded where 8 sequences do not fit beside it, and never where training goes on while sampling."""
  for gib in range(32, 12, -2):
    where, p = machine('H100', memory=gib * GIB), stage('ppo_gsm8k')
    chosen = defaults.choose(p, where)
    if chosen.get('rollout.offload'):
      assert needed(p, where, SMALLEST | {'rollout.slots': 8})[1] > 0.9 * 0.92 * gib * GIB
      break
  assert 8 <= chosen['rollout.slots'] < 256 and gib < 32
  stale = stage('ppo_gsm8k', rollout__staleness=1)
  assert 'rollout.offload' not in defaults.choose(stale, where)


# Settings of a stage, device, and the advice of its refusal
NEAREST = [
  (dict(name='grpo_gsm8k', rollout__slots=256), 'L4', '--config.rollout.slots=64'),
  (dict(name='sft_gsm8k', train__micro_batch_size=16, model__remat='dots'), 'L4', '--config.train.micro_batch_size=4'),
  (dict(name='sft_gsm8k', arg='model=qwen3_8b', mesh__train='data=8'), '8xH100', '--config.mesh.train=fsdp=-1'),
  (dict(name='ppo_gsm8k'), 'L4', '--config.model.param_dtype=bfloat16; or 2 of these devices'),
  (dict(name='grpo_gsm8k', arg='model=qwen3_8b'), 'H100', '--config.lora.rank=16; or 4 of these devices'),
]


@pytest.mark.parametrize('config, device, flags', NEAREST)
def test_advice_names_the_nearest_settings_that_fit(config, device, flags):
  where = machine(device)
  p = defaults.fitted(stage(**config), where)
  assert nearest.advice(p, where) == f'the nearest that fits, by arithmetic: {flags}'
  if config.get('model__remat') != 'dots':  # the other settings do not fit as they are
    assert not defaults.room(p, where).fits(p)


def test_advice_scales_the_estimate_to_the_count_of_the_compiler():
  """Where the compiler counts more than the estimate, the advice is fewer sequences."""
  p, where = defaults.fitted(stage('grpo_gsm8k', rollout__slots=256), machine('A100')), machine('A100')
  assert p.by_memory == {} and defaults.room(p, where).fits(p)
  (nearest_fit,) = nearest.nearest(p, dataclasses.replace(defaults.room(p, where), scale=(1.0, 3.0)))
  assert nearest_fit.settings == {'rollout.slots': 64}
  needs = defaults.room(p, where).needs(p)

  def advice(program, needed):
    return nearest.advice(nearest.counted(p, where, TooLargeError(program, needed, '')), where)

  assert advice('generate', 3 * needs.sampling).endswith(': --config.rollout.slots=64')
  assert '--config.train.micro_batch_size=' in advice('update', 4 * needs.updating)
  assert 'slots' not in advice('update', 4 * needs.updating)


def test_plan_chooses_again_where_the_compiler_counts_more(monkeypatch):
  """The plan has the settings that fit, or else the nearest that do."""
  open_slots, where = stage('grpo_gsm8k'), machine('A100')

  def plan(p, options):
    needs = defaults.room(dataclasses.replace(p, memory_scale=(1.0, 1.0)), where).needs(p)
    total = dict(update=needs.updating, generate=3 * needs.sampling)
    rows = [dict(program=name, bytes_per_chip=dict(total=size)) for name, size in total.items()]
    return dict(fits=max(total.values()) < where.memory, programs=rows, slots=p.config.rollout.slots)

  monkeypatch.setattr(auto.stage, 'plan', plan)
  options = plan_stage.Options(where)
  planned = auto.planned(open_slots, options)
  assert planned['slots'] == 64 and planned['fits'] and planned['nearest'] == ''
  planned = auto.planned(plan_stage.vary(open_slots, {'rollout.slots': 256}), options)
  assert not planned['fits'] and planned['nearest'].endswith(': --config.rollout.slots=64')


def test_examples_of_chosen_settings_in_the_docs_are_what_is_printed():
  docs = ' '.join((CLONE / 'docs' / 'accelerators.md').read_text('utf-8').split())
  notes = []
  defaults.fitted(stage('grpo_gsm8k'), machine('A100-40'), notes.append)
  assert len(notes) == 1 and f' {notes[0]} ' in docs, notes
  where = machine('H100')
  with pytest.raises(InputError) as refused:
    nearest.check_state(defaults.fitted(stage('grpo_gsm8k', 'model=qwen3_8b'), where), where)
  assert f' {refused.value} ' in docs, str(refused.value)


def test_search_plans_the_sampler_with_the_slots_that_a_run_chooses(monkeypatch):
  """The default slots do not fit on any mesh; a run chooses fewer, so the launch line needs only the mesh."""
  where = machines.Topology('two', 'a100', dataclasses.replace(CHIPS['a100'], memory=24e9), (1, 1, 2))
  planned = []

  def plan(p, options):
    fits = True
    if not options.only:
      fits = defaults.room(p, where).fits(p)
      planned.append((p.config.mesh.rollout, p.config.rollout.slots, fits))
    row = dict(program='update', calls=1, fits=fits, bytes_per_chip=dict(total=2**30), roofline_mfu=0.5)
    row |= dict(flops=dict(model=1.0), seconds=dict(no_overlap=1.0))
    return dict(fits=fits, programs=[row], trained_tokens=1000, step=dict(no_overlap=dict(step_s=1.0)))

  monkeypatch.setattr(plan_stage, 'plan', plan)
  out = io.StringIO()
  raw = dict(algorithm='grpo', reward='gsm8k', data=dict(path='none'), model=dict(preset='qwen3_0_6b'))
  raw |= dict(rollout=dict(prompts=64, group_size=8, max_prompt_length=1024, max_new_tokens=1024))
  (best,) = search.search(raw, plan_stage.Options(where), rich.console.Console(file=out, width=200))
  ((mesh, slots, fits),) = planned
  assert fits and 8 <= slots < 512 and best['settings']['mesh.rollout'] == mesh == 'data=-1'
  assert '--config.mesh.rollout=data=-1' in out.getvalue() and f'config.rollout.slots={slots}: ' in out.getvalue()


def test_meshes_are_compared_at_the_micro_batch_tokens_of_gpus_and_tpus():
  tokens = inspect.signature(batch_shape.batch_shape).parameters['tokens'].default
  assert all(compute_for(platform, 'auto', 'auto').micro_tokens == tokens for platform in ('gpu', 'tpu'))
