"""Renders the templates of cluster jobs for `launch.submit`."""

import pathlib
import re
import shlex
from typing import NamedTuple

import jinja2

from jaxpost.errors import InputError

TEMPLATES = pathlib.Path(__file__).parent / 'templates'


class Platform(NamedTuple):
  """How jobs are started on one kind of cluster."""

  template: str
  command: tuple[str, ...]  # runs the rendered file; (): it is only shown
  required: tuple[str, ...]  # flags that must be given
  optional: tuple[str, ...]  # other flags that it reads, besides COMMON


COMMON = ('name', 'retries', 'compile_cache', 'profile')  # flags that all platforms read
PLATFORMS = {
  'tpu': Platform('tpu.sh', ('bash',), ('tpu', 'zone', 'repo', 'revision'), ()),
  'slurm': Platform('slurm.sh', ('sbatch',), (), ('nodes', 'devices', 'hours')),
  'gke': Platform(
    'gke.yaml', ('kubectl', 'apply', '-f'), ('image',), ('nodes', 'devices', 'topology', 'accelerator', 'volume')
  ),
  'skypilot': Platform('skypilot.yaml', ('sky', 'jobs', 'launch', '--yes'), (), ('nodes', 'devices', 'accelerator')),
  'colab': Platform('colab.txt', (), ('repo', 'revision'), ()),
}
_NAME = '[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?'
# Values that templates insert without quotes -> their allowed form.
_PLAIN = {
  'name': _NAME,
  'tpu': _NAME,
  'zone': _NAME,
  'revision': '[A-Za-z0-9][A-Za-z0-9._/-]*',
  'topology': '[0-9]+(x[0-9]+)*',
  'accelerator': '[A-Za-z0-9][A-Za-z0-9._:-]*',
  'image': '[A-Za-z0-9][A-Za-z0-9._:/@-]*',
  'volume': '[a-z0-9][a-z0-9.-]*:/[A-Za-z0-9._/-]*',
}
# Flags of launch.submit that templates may use.
GIVEN = (
  'name',
  'nodes',
  'devices',
  'tpu',
  'zone',
  'repo',
  'revision',
  'image',
  'topology',
  'accelerator',
  'hours',
  'retries',
  'compile_cache',
  'profile',
  'volume',
)


def beside(workdir: str, name: str) -> str:
  """Returns a folder next to the run's, or inside it if it is a whole bucket."""
  parent, slash, bucket = workdir.rstrip('/').rpartition('/')
  if parent.endswith(':/'):  # gs://bucket
    return f'{parent}/{bucket}/{name}'
  return f'{parent}{slash}{name}'


def render(platform: str, words: list[str], given: dict) -> str:
  """Returns the job that runs `launch.train` with these arguments.

  Args:
    platform: a key of PLATFORMS.
    words: arguments of launch.train.
    given: {flag: value} of all of GIVEN.

  Raises:
    InputError: a flag or argument is missing, or has no effect on the platform.
  """
  _check_text(words, given)
  workdir = _check(platform, words, given)
  claim, _, mount = given['volume'].partition(':')
  if given['profile']:
    words = [*words, f'--config.log.profile_from={given["profile"]}']
  tpu = given['topology'] or given['tpu']

  def quote(text: str) -> str:
    word = shlex.quote(text)
    # tpu.sh contains the command in single quotes.
    return word.replace("'", "'\\''") if platform == 'tpu' else word

  if tpu:
    default_devices, default_accelerator = 4, 'tpu-v5p-slice'
    peers = ['--distributed']
  else:
    default_devices, default_accelerator = 8, 'nvidia-h100-80gb'
    address = f'{given["name"]}-hosts-0-0.{given["name"]}:8476'
    peers = [f'--coordinator={address}', f'--num_processes={given["nodes"]}', '--process_id=$(PROCESS_ID)']
  if platform == 'skypilot':
    default_accelerator = 'H100'
  values = dict(
    # Kubernetes replaces $(NAME) by a variable of the pod, and $$ stands for $.
    words=[word.replace('$(', '$$(') for word in words] if platform == 'gke' else words,
    train=' '.join(map(quote, words)),
    tpu=tpu,
    claim=claim,
    mount=mount,
    workdir=workdir,
    devices=given['devices'] or default_devices,
    accelerator=given['accelerator'] or default_accelerator,
    cache=given['compile_cache'] or beside(workdir, 'xla'),
    peers=peers,
  )
  env = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
  env.filters['q'] = quote
  template = (TEMPLATES / PLATFORMS[platform].template).read_text()
  return env.from_string(template).render(given | values)


def _check_text(words: list[str], given: dict) -> None:
  """Raises InputError for text that would be code, or a new line, in a shell script or YAML."""
  for name, pattern in _PLAIN.items():
    if given[name] and not re.fullmatch(pattern, given[name]):
      raise InputError(f'--{name}: {given[name]!r} is not of the form {pattern}')
  for text in (*words, *(str(value) for value in given.values())):
    if not text.isprintable():
      raise InputError(f'{text!r} has a line break or another control character, which a job cannot hold')


def _check(platform: str, words: list[str], given: dict) -> str:
  """Returns the --workdir; InputError if something is missing or cannot work."""
  missing = [f'--{name}' for name in PLATFORMS[platform].required if not given[name]]
  if missing:
    raise InputError(f'{platform} needs {", ".join(missing)}')
  workdirs = [word.partition('=')[2] for word in words if word.startswith('--workdir=')]
  if not workdirs or not any(word.startswith('--config=') for word in words):
    raise InputError('write --config=... and --workdir=... after --')
  workdir = workdirs[0]
  mount = given['volume'].partition(':')[2].rstrip('/')
  on_volume = bool(mount) and workdir.startswith(f'{mount}/')
  if platform == 'gke' and not on_volume and '://' not in workdir:
    raise InputError(
      f'gke: {workdir} would be local to each pod, and lost when a pod is replaced; '
      'give a gs:// folder, or --volume=CLAIM:/MOUNT and a --workdir below /MOUNT'
    )
  return workdir
