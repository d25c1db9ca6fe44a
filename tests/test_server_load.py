"""`launch.serve` under load: 1,000 clients at once on loopback; each request has one answer, and memory is freed."""

import asyncio
import collections
import dataclasses
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import scorecard
import tiny

from jaxpost.data import tokenizer
from jaxpost.environments import openai_server

CLONE = pathlib.Path(__file__).resolve().parents[1]
CLIENTS = 1000
REQUESTS = scorecard.REQUESTS
PATIENCE_S = 240  # the longest wait, on a busy machine
LEAVING = 50  # clients that disconnect before they have an answer


@dataclasses.dataclass
class Load:
  """Counts of the clients, and samples of the server's process.

  answers: number of replies to each request, by its number. refused: counts of statuses other than 200. failed: number
    of broken connections. memory_mb, threads, files: of the server, sampled while clients send requests; all
    connections are open at the first sample, and none at the last.
  """

  answers: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  failed: int = 0
  memory_mb: list = dataclasses.field(default_factory=list)
  threads: list = dataclasses.field(default_factory=list)
  files: list = dataclasses.field(default_factory=list)
  seconds: float = 0.0

  def sample(self, pid):
    status = dict(line.split(':', 1) for line in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines())
    self.memory_mb.append(int(status['VmRSS'].split()[0]) / 1024)
    self.threads.append(int(status['Threads']))
    self.files.append(_open_files(pid))


def _open_files(pid):
  return len(os.listdir(f'/proc/{pid}/fd'))


async def _until(condition):
  deadline = time.monotonic() + PATIENCE_S
  while not condition() and time.monotonic() < deadline:
    await asyncio.sleep(0.05)


def prompt(number):
  """Four token ids that are unique to a request."""
  return [number // 200**i % 200 for i in range(4)]


async def exchange(reader, writer, number):
  """Sends one request; returns (status, body) of the reply."""
  body = json.dumps(dict(prompt=prompt(number), max_tokens=2, temperature=1.0)).encode()
  head = f'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n'
  writer.write(head.encode() + body)
  await writer.drain()
  head = (await reader.readuntil(b'\r\n\r\n')).decode()
  content_length = int(head.lower().split('content-length: ')[1].split()[0])
  return int(head.split()[1]), json.loads(await reader.readexactly(content_length))


async def _client(port, numbers, ready, load):
  try:
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
  except OSError:
    load.failed += 1
    await ready.wait()
    return
  await ready.wait()
  try:
    for number in numbers:
      status, reply = await exchange(reader, writer, number)
      if status == 200 and reply['choices'][0]['prompt_token_ids'] == prompt(number):
        load.answers[number] += 1
      else:
        load.refused[status] += 1
  except (OSError, asyncio.IncompleteReadError):
    load.failed += 1
  finally:
    writer.close()


async def _leave(port):
  """Requests many tokens and disconnects before they can be sampled."""
  _, writer = await asyncio.open_connection('127.0.0.1', port)
  body = json.dumps(dict(prompt='leaving', max_tokens=24, n=64)).encode()
  writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
  await writer.drain()
  await asyncio.sleep(0.5)
  writer.transport.abort()


async def _run(port, pid, clients, requests, leaving):
  load, ready = Load(), asyncio.Barrier(clients + 1)
  tasks = [asyncio.create_task(_client(port, range(i, requests, clients), ready, load)) for i in range(clients)]
  await _until(lambda: _open_files(pid) > clients)  # a connection is made before the server has accepted it
  await ready.wait()
  started = time.monotonic()
  tasks += [asyncio.create_task(_leave(port)) for _ in range(leaving)]
  while not all(task.done() for task in tasks):
    load.sample(pid)
    await asyncio.wait(tasks, timeout=0.5)
  for task in tasks:
    task.result()
  load.seconds = time.monotonic() - started
  return load


def run(folder, record, clients=CLIENTS, requests=REQUESTS, leaving=LEAVING):
  """Runs `launch.serve` on a model folder under load; returns (`Load`, last line of the server, rows it recorded)."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * clients + 500)), hard))
  few_files = ['sh', '-c', 'ulimit -Sn 1024; exec "$@"', 'sh']  # a common default, which the server must raise
  command = [sys.executable, '-m', 'launch.serve', f'--model={folder}', f'--record={record}', '--port=0']
  command = [*few_files, *command, '--max_context=48', '--slots=64']
  server = subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, text=True)
  try:
    port = int(server.stdout.readline().split(':')[2].split('/')[0])
    asyncio.run(_run(port, server.pid, 8, 64, 0))  # compiles the programs
    load = asyncio.run(_run(port, server.pid, clients, requests, leaving))
    asyncio.run(_until(lambda: _open_files(server.pid) < 100))  # the server notices closed connections with a delay
    load.sample(server.pid)
    server.send_signal(signal.SIGTERM)
    last = server.communicate(timeout=PATIENCE_S)[0].strip()
    assert server.returncode == 0
  finally:
    server.kill()
  return load, last, [json.loads(line) for line in record.read_text().splitlines()][64:]


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_nothing_is_lost_or_answered_twice(tmp_path, record_property):
  record_property('cases', REQUESTS)
  folder = tiny.folder(tmp_path / 'nano')
  tokenizer.load('bytes').save(folder)
  load, last, rows = run(folder, tmp_path / 'asked.jsonl')
  assert not load.failed and not load.refused
  assert load.answers == dict.fromkeys(range(REQUESTS), 1)
  recorded = collections.Counter(tuple(row['prompt_ids']) for row in rows if len(row['prompt_ids']) == 4)
  assert recorded == {tuple(prompt(number)): 1 for number in range(REQUESTS)}
  answered, refused, cancelled = map(int, re.findall(r'\d+', last))
  assert refused == 0 and answered + cancelled == REQUESTS + 64 + LEAVING
  assert cancelled > LEAVING / 2  # a fast machine may answer some clients before they disconnect
  assert max(load.threads) - min(load.threads) <= openai_server._THREADS  # a pool starts threads on demand
  assert load.files[0] > CLIENTS and load.files[-1] < 100
  assert load.memory_mb[-1] < load.memory_mb[0] + 64
