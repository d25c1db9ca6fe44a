"""Starts a run where the machines are: one command for each kind of cluster.

  python -m launch.submit tpu --tpu=my-v5p-64 --zone=us-east5-a --repo=URL \\
      -- --config=configs/NAME.py --workdir=gs://BUCKET/RUN
  python -m launch.submit slurm --nodes=4 -- --config=... --workdir=DIR
  python -m launch.submit gke --nodes=4 --image=IMAGE --topology=2x2x4 -- ...
  python -m launch.submit gke --nodes=2 --image=IMAGE --devices=8 -- ...
  python -m launch.submit skypilot --nodes=2 --accelerator=H100 -- ...
  python -m launch.submit colab --repo=URL -- ...

What stands behind `--` goes to launch.train. --dry_run prints what would run
and runs nothing. All of them begin again where a run was preempted (42) or
failed, and stop at 0 (done), 2 (bad input) and 3 (no usable checkpoint).
"""

import subprocess
import sys
import tempfile

from absl import flags

from jaxpost.errors import InputError

from . import render

_DRY = flags.DEFINE_bool('dry_run', False, 'Print what would run.')
flags.DEFINE_string('name', 'jaxpost', 'Of the job.')
flags.DEFINE_integer('nodes', 1, 'Hosts.', lower_bound=1)
flags.DEFINE_integer('devices', 0, 'Of a host; 0: 8 GPUs, 4 TPU chips.')
flags.DEFINE_string('tpu', '', 'Name of a TPU slice that is up.')
flags.DEFINE_string('zone', '', 'Its zone.')
flags.DEFINE_string('repo', '', 'Git address of your clone.')
flags.DEFINE_string('image', '', 'Container with jaxpost at /jaxpost.')
flags.DEFINE_string('volume', '', 'CLAIM:/MOUNT, a volume on GKE that all pods write.')
flags.DEFINE_string('topology', '', 'Of a TPU slice on GKE: 2x2x4.')
flags.DEFINE_string('accelerator', '', 'As the cluster calls it.')
flags.DEFINE_integer('hours', 24, 'Time limit of a Slurm job.')
flags.DEFINE_integer('retries', 3, 'After failures; preemption is not one.')
flags.DEFINE_string('compile_cache', '', 'Where compiled programs stay; "": WORKDIR/../xla.')
flags.DEFINE_integer('profile', 0, 'First of three steps that are traced; 0: none.')


def main(argv):
  if argv[1:2] == [] or argv[1] not in render.PLATFORMS:
    raise InputError(f'say where: launch.submit {"|".join(render.PLATFORMS)}')
  platform, words = argv[1], argv[2:]
  given = {name: flags.FLAGS[name].value for name in render.GIVEN}
  text, command = render.render(platform, words, given), (render.PLATFORMS[platform][1])
  print(text, end='', flush=True)
  if _DRY.value or not command:
    return
  with tempfile.NamedTemporaryFile('w', suffix=f'.{platform}') as file:
    file.write(text)
    file.flush()
    sys.exit(subprocess.call([*command, file.name]))


if __name__ == '__main__':
  from . import exits

  exits.run(main, words=99)
