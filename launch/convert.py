"""Converts settings of another library to a config.

  python -m launch.convert trl grpo.yaml --algorithm=grpo --out=my.yaml
  python -m launch.convert verl run_grpo.sh --out=my.yaml
  python -m launch.convert tunix config.yaml
  python -m launch.convert maxtext rl.yml

Reads .yaml and .json files, and the options of a command in a shell script. The result is a YAML config with comments
that list each mapped setting, each setting that was not mapped, with the reason, and the defaults of the other library
that differ from ours, which are part of the config.
"""

import sys

from absl import flags

from jaxpost.errors import InputError

_OUT = flags.DEFINE_string('out', '', 'YAML file to write; default: standard output.')
_ALGORITHM = flags.DEFINE_string('algorithm', '', 'Method, such as sft or dpo; default: what the file says, or grpo.')


def main(argv):
  """Converts the file."""
  from jaxpost.stage.algorithms import ALGORITHMS
  from jaxpost.storage import object_store
  from jaxpost.tools import convert, converted_defaults

  if len(argv) != 3 or argv[1] not in convert.LIBRARIES:
    raise InputError(f'write launch.convert LIBRARY FILE, with one of {", ".join(convert.LIBRARIES)}')
  source = convert.read(argv[2])
  if likely := convert.looks_like(argv[1], source):
    print(f'{argv[2]} looks like settings of {likely}: write launch.convert {likely} {argv[2]}', file=sys.stderr)
  config, settings, defaults = converted_defaults.convert_with_defaults(argv[1], source, _ALGORITHM.value)
  if config['algorithm'] not in ALGORITHMS:
    raise InputError(
      f'{config["algorithm"]}: no method has this name; give --algorithm, one of {", ".join(ALGORITHMS)}'
    )
  text = convert.as_yaml(argv[1], argv[2], config, settings, defaults)
  if _OUT.value:
    object_store.write_text(_OUT.value, text)
  else:
    print(text, end='')
  named = any('algorithm' in setting.fields for setting in settings) or config['algorithm'] != 'grpo'
  if not _ALGORITHM.value and not named:
    print(f'{argv[2]} names no method, so this is a config of grpo; --algorithm chooses another', file=sys.stderr)
  mapped = sum(bool(setting.fields) for setting in settings)
  missing = [setting.name for setting in settings if not setting.fields and setting.reason != convert.NOT_NEEDED]
  counts = f'{len(settings)} settings: {mapped} mapped, {len(settings) - mapped - len(missing)} not needed here'
  print(f'{counts}, {len(missing)} not mapped: {", ".join(missing) or "none"}', file=sys.stderr)


if __name__ == '__main__':
  from . import exits

  exits.run(main, words=2)
