"""The flags of `launch.plan --fits`, and what it prints."""

import importlib
import json
import os
import shutil
from typing import NamedTuple

from absl import flags

from jaxpost.errors import refuse

flags.disclaim_key_flags()  # the flags belong to launch.plan


class FitsFlags(NamedTuple):
  """The flags of `launch.plan` for a table of what fits on which devices."""

  fits: flags.FlagHolder
  model: flags.FlagHolder
  devices: flags.FlagHolder
  methods: flags.FlagHolder


def define() -> FitsFlags:
  """Defines the flags, and that they, or --config and --topology, are given."""
  found = FitsFlags(
    flags.DEFINE_bool('fits', False, 'Show by arithmetic on which devices --model fits; nothing is compiled.'),
    flags.DEFINE_string('model', '', 'With --fits: a folder with a config.json, a run, or the name of a known shape.'),
    flags.DEFINE_list(
      'devices', [], 'With --fits: these, as H100,8xH100,h100:1x2x8,v5e-16; default: those of docs/fits.md.'
    ),
    flags.DEFINE_list('methods', [], 'With --fits: these methods, as grpo,sft_lora; default: all.'),
  )

  @flags.multi_flags_validator(['fits', 'model', 'config', 'topology'])
  def asks_for_one(given):
    wanted = ('model',) if given['fits'] else ('config', 'topology')
    missing = any(not given[name] for name in wanted)
    # A message of absl's own would have all of the config before it.
    refuse(missing, '--config and --topology say what to plan; or give --fits and --model')
    return True

  del asks_for_one
  return found


def show(given: FitsFlags, price: str, out: str):
  """Prints the commands of what fits and a table of all, and writes both to the file `out`, if it has a name."""
  model = given.model.value
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # no device is used
  import rich.console

  from jaxpost.planning import dry_run, fits
  from jaxpost.storage import object_store

  dry_run.find(model, '--model', {})  # an unknown name is an error of that flag
  names = fits.devices(given.devices.value)
  prices = fits.prices(price, names)
  methods, configs = fits.methods(given.methods.value), recipes(model)
  found = fits.cells({method: configs[method] for method in methods}, names)
  console = rich.console.Console(highlight=False, width=max(132, shutil.get_terminal_size().columns))
  weights = model if '/' in model else 'FOLDER'
  for cell in found:
    if cell.fits:
      console.print(f'{cell.method} on {cell.device}: {fits.command(cell, weights)}', soft_wrap=True)
  if weights != model and any(cell.fits for cell in found):
    console.print(f'FOLDER: where the weights of {model} are, or their name on the hub')
  # After the commands, which would scroll it away.
  console.print(fits.table(found, prices, f'{model}: by arithmetic, with what docs/fits.md assumes'))
  if out:
    rows = [fits.as_json(cell, weights, prices.get(cell.device)) for cell in found]
    object_store.write_text(out, json.dumps(rows, indent=1))
    console.print(f'wrote {out}')


def recipes(model: str) -> dict:
  """Returns {method: config of its recipe for this model}."""
  from jaxpost.planning import fits
  from jaxpost.stage import prepare

  out = {}
  for method, (recipe, more) in fits.METHODS.items():
    module = importlib.import_module(f'{__package__.removesuffix("launch")}configs.{recipe}')
    out[method] = prepare.as_dict(module.get_config(f'model={model}{more}'))
  return out
