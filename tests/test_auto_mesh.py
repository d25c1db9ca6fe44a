"""`config.mesh.train=auto` on eight devices: meshes are compiled, and the run uses the fastest that fits."""

import children
import pytest

RUN = '''
import dataclasses, json, pathlib, sys
sys.path.insert(0, 'tests')
import jax, rich.console, tiny
from jaxpost.monitor import metrics
import jaxpost
from jaxpost.errors import InputError
from jaxpost.planning import auto, dry_run, stage
from jaxpost.hardware import chips
from jaxpost.planning import machines
work = pathlib.Path(sys.argv[1])
model = tiny.folder(work / 'model')
config = tiny.grpo_config(model, mesh=dict(train='auto', rollout='auto'),
                          train=dict(steps=2), save=dict(every=1))
out = {}

def pretend(memory, link=1e8):
  """Devices of known speed: products cost nothing, the network all."""
  chip = chips.Chip('cpu', 1e15, memory, 1e15, link, link)
  machines.of_kind = lambda kind: chip

def run(name):
  console = rich.console.Console(record=True, width=200, quiet=False,
                                 file=open(work / (name + '.txt'), 'w'))
  jaxpost.run(config, work / name, console=console)
  return [x for x in console.export_text().splitlines()
          if x.startswith('config.mesh')]

out['unknown'] = run('unknown')
pretend(1e12)
here = machines.here(jax.devices())
p, = dry_run.prepare_all(config)
q = stage.vary(p, {'mesh.rollout': 'data=-1'})
plans = {m: stage.plan(stage.vary(q, {'mesh.train': m}),
                       stage.Options(here, ('update',)))
         for m in ('fsdp=-1', 'fsdp=-1,tensor=2', 'fsdp=-1,tensor=4')}
out['seconds'] = {m: x['programs'][0]['seconds']['no_overlap']
                  for m, x in plans.items()}
out['bytes'] = {m: x['programs'][0]['bytes_per_chip']['total']
                for m, x in plans.items()}
out['known'] = run('known')
out['again'] = run('known')
rows = metrics.read_rows(work / 'known' / 'metrics.jsonl')
out['steps'] = [r['step'] for r in rows if r['split'] == 'train']
slow = max(out['bytes'], key=out['bytes'].get)
least = min(out['bytes'].values())
for memory in (out['bytes'][slow] - 1, least - 1):
  pretend(memory)
  try:
    out[str(memory)] = auto.choose(p, machines.here(jax.devices()), print)
  except InputError as error:
    out[str(memory)] = str(error)
pretend(1e12)
plan, notes = auto._plan, []

def knows_not_all(p, settings, *rest):
  if 'tensor=2' in settings.get('mesh.train', ''):
    raise InputError('no such axis')
  return plan(p, settings, *rest)

auto._plan = knows_not_all
auto.choose(p, machines.here(jax.devices()), notes.append)
out['notes'] = notes
print(json.dumps(out))
'''

# Weights that are not given by the name of a preset: of an earlier run, and of folders at a relative path.
SOURCES = """
import json, os, pathlib, sys
sys.path.insert(0, 'tests')
import jax, rich.console, tiny
import jaxpost
from jaxpost.hardware import chips
from jaxpost.monitor import metrics
from jaxpost.planning import machines
os.chdir(sys.argv[1])
machines.of_kind = lambda kind: chips.Chip('cpu', 1e15, 1e12, 1e15, 1e8, 1e8)
tiny.folder('models/mine')
tiny.folder('models/judge', num_labels=1)
train = dict(steps=1, batch_size=8)
jaxpost.run(tiny.run_config('models/mine', train=train), 'runs/sft')
mesh = dict(mesh=dict(train='auto', rollout='auto'), train=train)
distill = dict(algorithm='distill', distill=dict(teachers=('models/mine',))) | mesh
ppo = dict(algorithm='ppo', init_from='runs/sft', lora=dict(rank=2), **mesh)
judged = dict(critic=dict(path='models/judge'), **mesh)
for name, config in {
  'shared': tiny.grpo_config('models/mine', **ppo),
  'judged': tiny.grpo_config('models/mine', **ppo | judged),
  'distill': tiny.run_config('runs/sft', **distill),
}.items():
  jaxpost.run(config, 'runs/' + name)
print(json.dumps({n: len(metrics.read_rows(pathlib.Path('runs', n, 'metrics.jsonl'))) for n in os.listdir('runs')}))
"""


@pytest.fixture(scope='module')
def out(tmp_path_factory):
  return children.printed('-c', RUN, str(tmp_path_factory.mktemp('auto')), devices=8, timeout=600)


@pytest.mark.ci
def test_auto_mesh_reads_weights_of_runs_and_relative_folders(tmp_path):
  """Policies, teachers, a critic on the frozen base of the policy's adapter, and a critic with its own weights."""
  rows = children.printed('-c', SOURCES, str(tmp_path), devices=8, timeout=600)
  assert rows == dict.fromkeys(('sft', 'shared', 'judged', 'distill'), 1)


def test_unknown_chips_train_with_fsdp_alone(out):
  assert out['unknown'] == ['config.mesh.train of grpo: fsdp=-1', 'config.mesh.rollout of grpo: data=-1']


def test_fastest_mesh_is_chosen_and_kept_on_resume(out):
  best = min(out['seconds'], key=out['seconds'].get)
  assert len(set(out['seconds'].values())) == 3
  assert out['known'][0] == f'config.mesh.train of grpo: {best}'
  assert out['steps'] == [1, 2]


def test_mesh_that_does_not_fit_is_not_chosen(out):
  slow = max(out['bytes'], key=out['bytes'].get)
  chosen = out[str(out['bytes'][slow] - 1)]
  assert 'fits on no mesh' in chosen or chosen['mesh.train'] != slow
  assert 'config.mesh.train: the update of grpo fits on no mesh' in out[str(min(out['bytes'].values()) - 1)]


def test_mesh_that_cannot_be_planned_is_reported(out):
  assert out['notes'][0] == 'fsdp=-1,tensor=2: no such axis'
  assert len(out['notes']) == 3
