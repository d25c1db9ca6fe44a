"""Data sets of the Hugging Face hub, played by a local HTTP server: download, offline cache and errors."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

SHA = 'a' * 40
FILES = {
  'README.md': b'not data',
  'data/train-0.jsonl': b'{"text": "one"}\n{"text": "two"}\n',
  'data/test-0.jsonl': b'{"text": "three"}\n',
}
BUSY = ['data/test-0.jsonl', 'GET']  # the path and method of the request that gets the status 429, once


class Hub(http.server.BaseHTTPRequestHandler):
  """Answers the requests of huggingface_hub for the data set org/name, which holds FILES."""

  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    path = self.path.split('?')[0]
    base = f'/datasets/org/name/resolve/{SHA}/'
    if BUSY and path.endswith(BUSY[0]) and self.command == BUSY[1]:
      BUSY.clear()
      self._send(429, b'')
    elif path.startswith(base) and path.removeprefix(base) in FILES:
      self._send(200, FILES[path.removeprefix(base)])
    elif path.startswith('/api/datasets/org/name/revision/'):
      revision = path.rsplit('/', 1)[1]
      if revision in ('main', SHA, 'v1'):
        siblings = [{'rfilename': f} for f in FILES]
        self._json({'id': 'org/name', 'sha': SHA, 'siblings': siblings})
      else:
        self._error('RevisionNotFound')
    elif path.startswith('/api/datasets/org/name/tree/'):
      self._json([{'type': 'file', 'path': f, 'size': len(d), 'oid': 'x'} for f, d in FILES.items()])
    elif path.startswith('/datasets/org/name/resolve/main/') and (path.split('/main/')[1] in FILES):
      self._send(200, FILES[path.split('/main/')[1]])
    elif '/org/name/' in path:
      self._error('EntryNotFound')
    else:
      self._error('RepoNotFound')

  do_HEAD = do_GET

  def _json(self, value):
    self._send(200, json.dumps(value).encode(), 'application/json')

  def _error(self, code):
    self._send(404, b'', headers={'X-Error-Code': code})

  def _send(self, status, data, kind='text/plain', headers=None):
    self.send_response(status)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(data)))
    self.send_header('ETag', f'"{hashlib.sha1(data).hexdigest()}"')
    self.send_header('X-Repo-Commit', SHA)
    for key, value in (headers or {}).items():
      self.send_header(key, value)
    self.end_headers()
    if self.command == 'GET':
      self.wfile.write(data)

  def log_message(self, *_):
    pass


@pytest.fixture
def endpoint():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  yield f'http://127.0.0.1:{server.server_port}'
  server.shutdown()
  server.server_close()


# Reads each path of its arguments. It runs in a process of its own, as huggingface_hub reads its settings on import.
SCRIPT = """
import sys
from jaxpost.data import sources
from jaxpost.errors import InputError
for path in sys.argv[1:]:
  try:
    rows = sources.read(path)
    print('|'.join(row['text'] for row in rows), rows.where(0))
  except InputError as error:
    print(error)
"""


def read(paths, home, **settings):
  """Returns a line for each path: its texts and where its first row is, or the error."""
  environment = {**os.environ, 'HF_HOME': str(home), 'HF_HUB_OFFLINE': '0', **settings}
  for name in ('HF_TOKEN', 'http_proxy', 'HTTP_PROXY'):
    environment.pop(name, None)
  process = subprocess.run(
    [sys.executable, '-c', SCRIPT, *paths],
    env=environment,
    timeout=120,
    capture_output=True,
    text=True,
    check=False,
    cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
  )
  assert process.returncode == 0, process.stderr
  assert 'Retrying' not in process.stderr
  return process.stdout.splitlines()


def test_rows_are_read_from_the_hub_and_offline_from_its_cache(endpoint, tmp_path):
  paths = [
    'org/name:data/train-0.jsonl',
    'org/name:train',
    'org/name@v1:test',
    'org/name',
    'org/name:data/none.jsonl',
    'org/name@v9:test',
    'org/other',
  ]
  lines = read(paths, tmp_path, HF_ENDPOINT=endpoint)
  assert not BUSY
  assert lines[0] == 'one|two org/name:data/train-0.jsonl:1'
  assert lines[1].startswith('one|two ') and lines[1].endswith('-0.jsonl:1')
  assert lines[2].startswith('three ')
  assert 'has the splits test, train; name one, e.g. org/name:train' in lines[3]
  assert "has no file 'data/none.jsonl'" in lines[4]
  assert "org/name has no revision 'v9'" in lines[5]
  assert 'there is no dataset org/other' in lines[6]
  offline = read(['org/name:train', 'org/other'], tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE='1')
  assert offline[0].startswith('one|two ')
  assert 'not in the local cache and the hub is off' in offline[1]
