"""Compiles a run for a described machine, on any CPU: does it fit, how fast, at what cost.

  python -m launch.plan --config=configs/sft_gsm8k.py:model=qwen3_8b \\
      --topology=v6e:16x16 --config.mesh.train=fsdp=-1 --price=1.5
  python -m launch.plan --config=configs/grpo_gsm8k.py:model=qwen3_8b \\
      --topology=h200:1x8x8 --out=plan.json
  python -m launch.plan --config=my.py --topology=v5p:4x4x4 --search
  python -m launch.plan --fits --model=Qwen/Qwen3-8B --devices=H100,v5e-16 --price=H100=2.5

The last one compiles nothing. It computes in seconds which of SFT, DPO, GRPO and LoRA fit on
common GPUs and TPU slices, with the command for each (docs/fits.md). Named models need no
weights, tokenizer or data. No device is used. docs/planning.md explains the output.
"""

import json
import logging
import shutil
import sys

from absl import flags

from . import config_flag, exits, fits_flags

_CONFIG = config_flag.define_config()
_TOPOLOGY = flags.DEFINE_string('topology', None, 'Machine: v5e-16, v5p:8x8x8, 8xH100, h200:1x8x8, cpu or cpu:8.')
_SLICES = flags.DEFINE_integer('slices', 1, 'TPU slices, connected by the data center network.', lower_bound=1)
_STAGE = flags.DEFINE_string('stage', '', 'Plan only this stage.')
_PROGRAMS = flags.DEFINE_list('programs', [], 'Programs to compile, as update,generate; default: all.')
_PRICE = flags.DEFINE_string('price', '', 'US dollars per chip and hour; with --fits also as H100=2.5,v5e-8=1.2.')
_OUT = flags.DEFINE_string('out', '', 'File for the plan as JSON.')
_SEARCH = flags.DEFINE_bool(
  'search',
  False,
  'Try meshes, rematerialization and batch sizes: fsdp with each size of the tensor axis, '
  'and up to six meshes with data, expert or context axes.',
)
_FITS = fits_flags.define()


def main(argv):
  """Plans each stage, searches for its mesh, or computes what fits on which devices, and prints the tables."""
  del argv
  logging.getLogger().setLevel(logging.ERROR)
  if _FITS.fits.value:
    exits.refuse(('config', 'topology', 'slices', 'stage', 'programs', 'search'), 'with --fits')
    return fits_flags.show(_FITS, _PRICE.value, _OUT.value)
  exits.refuse(('model', 'devices', 'methods'), 'without --fits')
  from jaxpost.planning import machines

  price = machines.price(_PRICE.value or '0')
  topology = machines.parse(_TOPOLOGY.value, _SLICES.value)
  machines.set_environment(topology)
  import rich.console

  from jaxpost.planning import auto, defaults, dry_run, search, stage, tables
  from jaxpost.stage import prepare
  from jaxpost.storage import object_store

  console = rich.console.Console(highlight=False, width=max(132, shutil.get_terminal_size().columns))
  raw = prepare.as_dict(_CONFIG.value)
  plans = []
  stage.check_names(_PROGRAMS.value)
  options = stage.Options(topology, tuple(_PROGRAMS.value), price, _STAGE.value)
  if _SEARCH.value:
    exits.refuse(('programs',), 'with --search')
    plans = search.search(raw, options, console, tuple(sys.argv[1:]))
  else:
    for p in dry_run.prepare_all(raw, options.stage):
      p = stage.vary(p, auto.choose(p, topology, console.print))
      p = defaults.fitted(p, topology, console.print)
      plans.append(auto.planned(p, options, console.print))
      tables.show(plans[-1], console)
  if _OUT.value:
    object_store.write_text(_OUT.value, json.dumps(plans, indent=1))
    console.print(f'wrote {_OUT.value}')


if __name__ == '__main__':
  exits.run(main)
