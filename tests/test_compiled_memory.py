"""The defaults that arithmetic chooses for recipes, beside XLA's count of the memory of all their programs.

Programs are compiled for devices that are not there. Updates scan the layers, so a whole model compiles as fast as two
layers. Sampling does not: models of 2 and 4 layers are compiled, and as its memory grows evenly with the number of
layers, that of the whole model follows from the two. Defaults are those chosen for the whole model.
"""

import json
import pathlib
import re

import children
import described
import pytest

from jaxpost.hardware import memory

CLONE = pathlib.Path(__file__).resolve().parents[1]
COUNT = '''
import dataclasses, importlib, json, sys

from jaxpost.planning import machines

recipe, model, device, settings = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
machine = machines.parse(device)
machines.set_environment(machine)

from jaxpost.hardware import memory
from jaxpost.models import presets
from jaxpost.planning import defaults, dry_run, stage
from jaxpost.rollout import buckets
from jaxpost.stage import prepare

# Only the largest shapes of decoding, which take most: all slots, and all entries of their caches.
buckets.Buckets.row_sizes = lambda self: [self.slots]
buckets.entries_read = lambda length, cache_length, page_size: cache_length

whole = presets.PRESETS[model]


def of_layers(number):
  presets.PRESETS[model] = dataclasses.replace(whole, num_layers=number)
  config = importlib.import_module(f'configs.{recipe}').get_config()
  config.update_from_flattened_dict({'model.path': model} | settings)
  (p,) = dry_run.prepare_all(prepare.as_dict(config))
  return p


p = of_layers(whole.num_layers)
chosen = defaults.choose(p, machine)
needs = defaults.room(p, machine).needs(p, chosen)


def compiled(layers, names):
  """Returns {program: the most bytes of a device}."""
  out = {}
  only = tuple(name for name in stage.PROGRAMS if name in names)
  for row in stage.plan(stage.vary(of_layers(layers), chosen), stage.Options(machine, only))['programs']:
    out[row['program']] = max(out.get(row['program'], 0), row['bytes_per_chip']['total'])
  return out


found = compiled(whole.num_layers, set(stage.PROGRAMS) - set(memory.SAMPLING))
if needs.sampling:
  few, more = compiled(2, memory.SAMPLING), compiled(4, memory.SAMPLING)
  found |= {name: few[name] + (more[name] - few[name]) * (whole.num_layers - 2) / 2 for name in more}
print(json.dumps(dict(
  chosen=chosen, memory=machine.memory, updating=needs.updating, sampling=needs.sampling, compiled=found
)))
'''


def counted(recipe, model, device, settings):
  """Returns what COUNT prints: {'chosen', 'memory', 'updating', 'sampling', 'compiled': {program: bytes}}."""
  return children.printed('-c', COUNT, recipe, model, device, json.dumps(settings), timeout=3000)


def check(recipe, model, device, settings=None):
  """Asserts that all programs fit, and that arithmetic is within 15 % of XLA's count of updates and of sampling.

  Args:
    settings: {'section.field': value} of the config.
  """
  found = counted(recipe, model, device, settings or {})
  assert max(found['compiled'].values()) <= found['memory'], found
  assert 0.85 < found['updating'] / found['compiled']['update'] < 1.15, found
  if sampling := [size for name, size in found['compiled'].items() if name in memory.SAMPLING]:
    assert 0.85 < found['sampling'] / max(sampling) < 1.15, found


@described.GPUS
@pytest.mark.nightly
@pytest.mark.parametrize('device', ['h100', 'a100'])
@pytest.mark.parametrize('recipe', ['sft_gsm8k', 'dpo_hh', 'grpo_gsm8k'])
def test_defaults_of_recipes_fit_for_gpus(recipe, device):
  """The docstrings of the recipes name one accelerator of 80 GB."""
  check(recipe, 'qwen3_0_6b', device)


RECIPES = sorted(path.stem for path in CLONE.glob('configs/*.py') if 'Meant for ' in path.read_text('utf-8'))


@described.GPUS
@pytest.mark.nightly
@pytest.mark.parametrize('recipe', RECIPES)
def test_recipes_fit_for_gpus_that_their_docstrings_name(recipe, tmp_path):
  """One accelerator of 80 GB or eight, with nothing set. All layers are compiled, which takes minutes."""
  text = (CLONE / f'configs/{recipe}.py').read_text('utf-8')
  (number,) = re.findall(r'Meant for (one|eight)\s+accelerators?\s+of\s+80\s+GB', text)
  gpus = {'one': 1, 'eight': 8}[number]
  out = tmp_path / 'plan.json'
  options = f'--config=configs/{recipe}.py', f'--topology=h100:1x1x{gpus}', f'--out={out}'
  children.run('-m', 'launch.plan', *options, timeout=3000)
  for plan in json.loads(out.read_text()):
    assert plan['fits'] and all(row['fits'] for row in plan['programs']), plan['stage']
    assert 'update' in {row['program'] for row in plan['programs']}


# The shapes of GRPO that are common in the literature.
GRPO = {'rollout.prompts': 64, 'rollout.group_size': 8, 'rollout.max_new_tokens': 1024}


@described.GPUS
@pytest.mark.nightly
def test_defaults_of_grpo_with_512_completions_of_1024_tokens_fit_for_gpus():
  check('grpo_gsm8k', 'qwen3_1_7b', 'h100', GRPO)


@described.TPUS
@pytest.mark.nightly
@pytest.mark.parametrize('device', ['v5e-8', 'v6e-8', 'v5p-8'])
@pytest.mark.parametrize('recipe', ['sft_gsm8k', 'dpo_hh', 'grpo_gsm8k'])
def test_defaults_of_recipes_fit_for_tpus(recipe, device):
  check(recipe, 'qwen3_0_6b', device)
