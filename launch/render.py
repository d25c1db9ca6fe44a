"""Templates of cluster jobs -> the text that `launch.submit` runs or shows."""

import pathlib
import shlex

import jinja2

from jaxpost.errors import InputError

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
# Platform -> (template, what runs it, flags it cannot do without).
PLATFORMS = {
  'tpu': ('tpu.sh', ('bash',), ('tpu', 'zone', 'repo')),
  'slurm': ('slurm.sh', ('sbatch',), ()),
  'gke': ('gke.yaml', ('kubectl', 'apply', '-f'), ('image',)),
  'skypilot': ('skypilot.yaml', ('sky', 'jobs', 'launch', '--yes'), ()),
  'colab': ('colab.txt', (), ('repo',)),
}


GIVEN = (
  'name',
  'nodes',
  'devices',
  'tpu',
  'zone',
  'repo',
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
  """A folder next to the run's; in a bucket that is all of it, inside."""
  parent, slash, last = workdir.rstrip('/').rpartition('/')
  if parent.endswith(':/'):  # gs://bucket
    return f'{parent}/{last}/{name}'
  return f'{parent}{slash}{name}'


def render(platform: str, words: list[str], given: dict) -> str:
  """The text that runs `launch.train` with these arguments there."""
  template, _, needs = PLATFORMS[platform]
  missing = [f'--{n}' for n in needs if not given[n]]
  workdir = [w.partition('=')[2] for w in words if w.startswith('--workdir=')]
  if missing or not workdir or not any(w.startswith('--config=') for w in words):
    raise InputError(
      f'{platform} needs {", ".join(missing)}' if missing else 'write --config=... and --workdir=... behind --'
    )
  claim, _, mount = given['volume'].partition(':')
  below = bool(mount) and workdir[0].startswith(f'{mount.rstrip("/")}/')
  if platform == 'gke' and not below and '://' not in workdir[0]:
    raise InputError(
      f'gke: each pod would have a {workdir[0]} of its own, and none after '
      'it is replaced; give a gs:// folder, or --volume=CLAIM:/MOUNT and a '
      '--workdir below /MOUNT'
    )
  if given['profile']:
    words = [*words, f'--config.log.profile_from={given["profile"]}']
  slice_ = given['topology'] or given['tpu']
  address = f'{given["name"]}-hosts-0-0.{given["name"]}:8476'
  env = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
  # A word of the shell, also inside the single quotes of tpu.sh.
  quote = lambda text: shlex.quote(text).replace("'", "'\\''") if (platform == 'tpu') else shlex.quote(text)
  env.filters['q'] = quote
  return env.from_string((TEMPLATES / template).read_text()).render(
    given
    | dict(
      words=words,
      train=' '.join(map(quote, words)),
      tpu=slice_,
      claim=claim,
      mount=mount,
      workdir=workdir[0],
      devices=given['devices'] or (4 if slice_ else 8),
      accelerator=given['accelerator']
      or {'skypilot': 'H100'}.get(platform, 'tpu-v5p-slice' if slice_ else 'nvidia-h100-80gb'),
      cache=given['compile_cache'] or beside(workdir[0], 'xla'),
      peers=['--distributed']
      if slice_
      else [f'--coordinator={address}', f'--num_processes={given["nodes"]}', '--process_id=$(PROCESS_ID)'],
    )
  )
