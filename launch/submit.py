"""Starts a run on a cluster: TPU VMs, Slurm, GKE, SkyPilot or Colab.

  python -m launch.submit tpu --tpu=my-v5p-64 --zone=us-east5-a --repo=URL \\
      -- --config=configs/NAME.py --workdir=gs://BUCKET/RUN
  python -m launch.submit slurm --nodes=4 -- --config=... --workdir=DIR
  python -m launch.submit gke --nodes=4 --image=IMAGE --topology=2x2x4 -- ...
  python -m launch.submit gke --nodes=2 --image=IMAGE --devices=8 -- ...
  python -m launch.submit skypilot --nodes=2 --accelerator=H100 -- ...
  python -m launch.submit colab --repo=URL -- ...

Arguments after `--` go to launch.train. --dry_run prints the job without starting
it. Every job resumes after a preemption (exit code 42) or a failure, and stops at 0
(done), 2 (bad input), 3 (no usable checkpoint), 4 (diverged) and 5 (no room on the disk);
SkyPilot restarts after any failure, --retries times.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl import flags

from jaxpost.errors import InputError

from . import exits, render

_DRY = flags.DEFINE_bool('dry_run', False, 'Print the job without starting it.')
flags.DEFINE_string('name', 'jaxpost', 'Name of the job.')
flags.DEFINE_integer('nodes', 1, 'Number of hosts.', lower_bound=1)
flags.DEFINE_integer('devices', 0, 'Devices per host; 0: 8 GPUs or 4 TPU chips.', lower_bound=0)
flags.DEFINE_string('tpu', '', 'Name of a running TPU slice.')
flags.DEFINE_string('zone', '', 'Zone of the TPU slice.')
flags.DEFINE_string('repo', '', 'Git URL of your clone.')
flags.DEFINE_string('revision', '', 'Commit, tag or origin/BRANCH of --repo to run; "": the commit of this clone.')
flags.DEFINE_string('image', '', 'Container image with jaxpost at /jaxpost.')
flags.DEFINE_string('volume', '', 'Volume on GKE that all pods can write, as CLAIM:/MOUNT.')
flags.DEFINE_string('topology', '', 'Topology of a TPU slice on GKE, as 2x2x4.')
flags.DEFINE_string('accelerator', '', 'Type of accelerator, as the cluster names it.')
flags.DEFINE_integer('hours', 24, 'Time limit of a Slurm job, in hours.', lower_bound=1)
flags.DEFINE_integer('retries', 3, 'Restarts after failures; preemptions do not count.', lower_bound=0)
flags.DEFINE_string('compile_cache', '', 'Folder of the compile cache; "": WORKDIR/../xla.')
flags.DEFINE_integer('profile', 0, 'First of three steps to profile; 0: none.', lower_bound=0)


def main(argv):
  """Renders the job and starts it."""
  if len(argv) < 2 or argv[1] not in render.PLATFORMS:
    raise InputError(f'name a platform: python -m launch.submit {"|".join(render.PLATFORMS)}')
  platform, words = argv[1], argv[2:]
  _, command, required, optional = render.PLATFORMS[platform]
  read = {*render.COMMON, *required, *optional}
  exits.refuse([name for name in render.GIVEN if name not in read], f'on {platform}')
  given = {name: flags.FLAGS[name].value for name in render.GIVEN}
  if 'revision' in read:
    given['revision'] = given['revision'] or _commit()
  text = render.render(platform, words, given)
  print(text, end='', flush=True)
  if _DRY.value or not command:
    return
  if not shutil.which(command[0]):
    raise InputError(f'{command[0]}: is not on this machine; the job above was not started (--dry_run only prints it)')
  with tempfile.NamedTemporaryFile('w', suffix=f'.{platform}') as file:
    file.write(text)
    file.flush()
    sys.exit(subprocess.call([*command, file.name]))


def _commit() -> str:
  """Returns the commit of the clone that this file is in; '' where it is installed, or git is not."""
  clone = pathlib.Path(__file__).resolve().parents[1]
  if not (clone / '.git').exists() or not shutil.which('git'):
    return ''
  done = subprocess.run(['git', '-C', str(clone), 'rev-parse', 'HEAD'], capture_output=True, text=True)
  return done.stdout.strip()


if __name__ == '__main__':
  exits.run(main, words=99)
