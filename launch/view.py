"""Shows the episodes of a run: prompts, completions, rewards, tokens.

  python -m launch.view --run=runs/quickstart
  python -m launch.view --run=runs/quickstart --out=episodes.html

Starts a server on this machine and prints its address; the page follows a run in progress.
With --out, writes one HTML file that needs no server, of the first --most episodes. Episodes without
a reward and truncated ones come first. In steps of which the run kept the rollouts
(`--config.log.rollouts_every=1`), tokens are colored by advantage and log-prob, and by what the method
has computed: ratio to the sampler, entropy, KL to the reference; the page names the fields that save
what is missing. Uses no device.
"""

from absl import flags

_RUN = flags.DEFINE_string('run', None, 'Folder of a run, finished or not.')
_OUT = flags.DEFINE_string('out', '', 'HTML file to write instead of starting a server.')
_MOST = flags.DEFINE_integer('most', 2000, 'Largest number of episodes in the file.', lower_bound=1)
_PORT = flags.DEFINE_integer('port', 8100, 'Port of the server; 0: any free one.', lower_bound=0, upper_bound=65535)
flags.mark_flags_as_required(['run'])


def main(argv):
  """Serves the viewer until Ctrl-C, or writes the file."""
  del argv
  from jaxpost.tools import rollout_view

  if _OUT.value:
    count = rollout_view.write_file(_RUN.value, _OUT.value, _MOST.value)
    print(f'{_OUT.value}: {count} episodes')
    return
  server = rollout_view.make_server(_RUN.value, _PORT.value)
  print(f'http://localhost:{server.server_port}  (Ctrl-C ends it)', flush=True)
  try:
    server.serve_forever()
  except KeyboardInterrupt:
    server.server_close()


if __name__ == '__main__':
  from . import exits

  exits.run(main)
