"""System calls of a program in the sandbox (`workers.seccomp`): dangerous ones do not exist, ordinary programs work."""

import errno
import pathlib
import platform
import re
import struct

import pytest
from sandboxes import needs_namespaces

from jaxpost.workers import sandbox, seccomp

LIMITS = sandbox.SandboxLimits(timeout_s=20.0, memory_mb=1024)


# name: (number on x86_64, number on aarch64, arguments)
REFUSED = {
  'keyctl: the id of the session keyring': (250, 219, (0, -3, 0)),
  'add_key': (248, 217, (b'user', b'x', b'x', 1, -3)),
  'request_key': (249, 218, (b'user', b'x', None, -3)),
  'io_uring_setup': (425, 425, (1, None)),
  'memfd_create': (319, 279, (b'x', 0)),
  'memfd_secret': (447, 447, (0,)),
  'shmget': (29, 194, (0, 1 << 20, 0o1600)),
  'msgget': (68, 186, (0, 0o1600)),
  'semget': (64, 190, (0, 1, 0o1600)),
  'userfaultfd': (323, 282, (1,)),
  'bpf': (321, 280, (0, None, 0)),
  'perf_event_open': (298, 241, (None, 0, -1, -1, 0)),
  'ptrace': (101, 117, (0, 0, 0, 0)),
  'process_vm_readv': (310, 270, (1, None, 0, None, 0, 0)),
  'unshare': (272, 97, (0,)),
  'setns': (308, 268, (0, 0)),
  'mount': (165, 40, (b'x', b'/', b'tmpfs', 0, None)),
  'personality': (135, 92, (0x0040000,)),
  'clone3': (435, 435, (None, 0)),
  'limits of process 1': (302, 261, (1, 7, None, None)),
  'clone into a user namespace': (56, 220, (0x10000000 | 17, 0, 0, 0, 0)),
  'a socket of the hypervisor': (41, 198, (40, 1, 0)),
  'a socket of the kernel': (41, 198, (16, 3, 0)),
  'a socket of its ciphers': (41, 198, (38, 5, 0)),
  'a number that no kernel has': (9999, 9999, ()),
}
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number, arguments in {calls}:
  result = libc.syscall(number, *arguments)
  if result == 0 and {clone} in (number,): os._exit(0)
  print(ctypes.get_errno() if result < 0 else 0)
"""

WORKS = {
  'threads': 'import concurrent.futures as f\nprint(sum(f.ThreadPoolExecutor(4).map(int, "123")))',
  'child processes': (
    'import subprocess, sys\nprint(subprocess.check_output([sys.executable, "-c", "print(6)"], text=True))'
  ),
  'multiprocessing': (
    'import multiprocessing as m\nm.set_start_method("fork")\n'
    'def f(q): q.put(6)\nq = m.Queue()\np = m.Process(target=f, args=(q,))\np.start()\nprint(q.get())\np.join()'
  ),
  'asyncio': (
    'import asyncio\nasync def f():\n'
    '  p = await asyncio.create_subprocess_shell("echo 6", stdout=-1)\n'
    '  print((await p.communicate())[0].decode())\nasyncio.run(f())'
  ),
  'pairs of sockets': 'import socket\na, b = socket.socketpair()\na.send(b"6")\nprint(b.recv(1).decode())',
  'files': (
    'import os, shutil, tempfile, mmap\nd = tempfile.mkdtemp()\np = d + "/x"\nopen(p, "w").write("6")\n'
    'os.rename(p, d + "/y")\nos.chmod(d + "/y", 0o600)\nos.utime(d + "/y")\nos.symlink("y", d + "/z")\n'
    'print(mmap.mmap(os.open(d + "/z", os.O_RDWR), 1)[:].decode())\nshutil.rmtree(d)'
  ),
  'timers': (
    'import signal, time, threading\nsignal.signal(signal.SIGALRM, lambda *a: print(6))\n'
    'signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(0.1)\nthreading.Event().wait(0.01)'
  ),
  'sqlite': 'import sqlite3\nd = sqlite3.connect("x.db")\nprint(d.execute("select 6").fetchone()[0])',
  'random numbers': (
    'import random, secrets, uuid, hashlib\nuuid.uuid4(), secrets.token_hex()\nprint(random.randint(6, 6))'
  ),
}


@needs_namespaces
def test_dangerous_calls_do_not_exist():
  column = {'x86_64': 0, 'aarch64': 1}[platform.machine()]
  calls = [(row[column], row[2]) for row in REFUSED.values()]
  clone = REFUSED['clone into a user namespace'][column]
  (output,) = sandbox.run_inputs(CALL.format(calls=calls, clone=clone), [''], LIMITS)
  errors = dict(zip(REFUSED, map(int, output.split()), strict=True))
  assert errors == dict.fromkeys(REFUSED, errno.ENOSYS)


@needs_namespaces
@pytest.mark.parametrize('program', WORKS.values(), ids=WORKS)
def test_ordinary_programs_work(program):
  (output,) = sandbox.run_inputs(program, [''], LIMITS)
  assert output and output.strip() == '6'


@needs_namespaces
def test_numpy_works():
  program = 'import numpy as np\nprint(int(np.linalg.solve(np.eye(300), np.full(300, 6.0))[0]))'
  limits = sandbox.SandboxLimits(timeout_s=60.0, memory_mb=4096, packages=True)
  assert sandbox.run_inputs(program, [''], limits) == ['6\n']


@pytest.mark.parametrize(
  'machine, header',
  [('x86_64', '/usr/include/x86_64-linux-gnu/asm/unistd_64.h'), ('aarch64', '/usr/include/asm-generic/unistd.h')],
)
def test_numbers_are_those_of_the_kernel(machine, header):
  if not pathlib.Path(header).exists():
    pytest.skip(f'{header} is not installed')
  defined = re.findall(r'#define __NR(?:3264)?_(\w+)\s+(\d+)', pathlib.Path(header).read_text())
  kernel = {name: int(number) for name, number in defined}
  kernel['newfstatat'] = kernel.get('newfstatat', kernel.get('fstatat'))
  numbers = seccomp.numbers(machine)
  assert {name: kernel.get(name, number) for name, number in numbers.items()} == numbers
  assert len(kernel.keys() & numbers) > 150


def verdict(code, number, argument=0, audit=0xC000003E):
  """Returns the verdict of the filter for a call, from an emulator of the BPF machine of the kernel."""
  data = struct.pack('=IIQ6Q', number, audit, 0, argument, 0, 0, 0, 0, 0)
  instructions = list(struct.iter_unpack('=HBBI', code))
  position = value = 0
  while True:
    operation, if_true, if_false, operand = instructions[position]
    position += 1
    if operation == 0x20:
      (value,) = struct.unpack_from('=I', data, operand)
    elif operation == 0x06:
      return operand
    else:
      position += (
        if_true
        if {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
        else if_false
      )


@pytest.mark.parametrize('machine, audit', [('x86_64', 0xC000003E), ('aarch64', 0xC00000B7)])
def test_filter_allows_listed_calls_and_nothing_else(machine, audit):
  code, known = seccomp.program(machine), seccomp.numbers(machine)
  for number in range(600):
    listed = number in known.values() and number != known['prlimit64']
    assert (verdict(code, number, 1, audit) == 0x7FFF0000) == listed, number
  assert len(code) // 8 <= 4096
  refused = 0x00050000 | errno.ENOSYS
  assert verdict(code, known['read'], 0, audit=0x40000003) == refused  # a call of a 32-bit program
  assert verdict(code, known['read'] | 0x40000000, 0, audit) == refused  # a call of an x32 program
  for pid, allowed in ((0, True), (1, False), (2**32 - 1, False)):  # 0 is the process itself
    assert (verdict(code, known['prlimit64'], pid, audit) == 0x7FFF0000) == allowed
  for family, allowed in ((1, True), (2, True), (10, True), (0, False), (16, False), (40, False)):
    assert (verdict(code, known['socket'], family, audit) == 0x7FFF0000) == allowed
  for flags, allowed in ((17, True), (0x3D0F00, True), (0x10000011, False), (0x00020000, False), (0x80, False)):
    assert (verdict(code, known['clone'], flags, audit) == 0x7FFF0000) == allowed, hex(flags)


def test_a_machine_without_a_list_is_refused():
  with pytest.raises(OSError, match='no list of system calls for riscv64'):
    seccomp.program('riscv64')
