"""Isolates a process in new Linux namespaces, without privileges.

`isolated` creates user, mount, pid, network, ipc and uts namespaces (unshare(2)) and a new root file system, and runs a
function as process 1 inside them. Consequences for the function and its children:

  user      they are root only in their namespace, or no user at all (NOBODY_ID)
  mount     they see a new root: the system's and the interpreter's folders, read-only, four devices, a writable folder
  pid       they see only each other; when process 1 ends, the kernel kills all of them
  network   there is no interface but a loopback device that is down
  ipc, uts  System V objects, message queues and the host name are not the host's

Needs Linux 5.12 or newer (mount_setattr), and a kernel that lets unprivileged users create user namespaces.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

NOBODY_ID = 65534  # the uid and gid that own nothing
# Constants of linux/sched.h, sys/mount.h, linux/mount.h, linux/prctl.h
_NEW = {
  'user': 0x10000000,
  'mount': 0x20000,
  'pid': 0x20000000,
  'network': 0x40000000,
  'ipc': 0x08000000,
  'uts': 0x04000000,
}
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC = 2, 4, 0x1000, 0x4000
_MS_PRIVATE, _MNT_DETACH = 1 << 18, 2
_SYS_MOUNT_SETATTR = 442  # on every architecture; Linux 5.12
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_SYS_KEYCTL = {'x86_64': 250, 'aarch64': 219}
_JOIN_SESSION_KEYRING = 1  # of linux/keyctl.h
# Mounted read-only where they exist; there is no /etc, /home, /proc, /sys or /var.
_SYSTEM = (
  '/usr',
  '/bin',
  '/sbin',
  '/lib',
  '/lib32',
  '/lib64',
  '/nix/store',
  '/gnu/store',
  '/etc/ld.so.cache',
  '/etc/alternatives',
)
_DEVICES = ('/dev/null', '/dev/zero', '/dev/random', '/dev/urandom')

libc = ctypes.CDLL(None, use_errno=True)


def report(line: dict) -> None:
  """Writes a JSON line to stdout, the pipe to sandbox.py."""
  data = memoryview(json.dumps(line).encode() + b'\n')
  while data:  # A signal handler that runs meanwhile ends a write before all is written.
    data = data[os.write(1, data) :]


def check(result: int, call: str) -> None:
  """Raises OSError with errno if a C call has returned a negative result; `call` begins the message."""
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{call}: {os.strerror(number)}')


def isolated(serve: Callable[[bool], None], binds: Iterable[str], work: str) -> int:
  """Calls serve(root) as process 1 of new namespaces; returns an exit code.

  There are three processes. This one maps the user ids and waits; the second creates the namespaces; the third is
  process 1 inside them. Each is killed when its parent ends.

  Args:
    serve: the function. `root` is True if it runs as root of its user namespace and can switch to NOBODY_ID; otherwise
      it already is NOBODY_ID.
    binds: folders that stay visible, read-only, besides the system's.
    work: path of the one folder that is left empty, for a writable mount.
  """
  root = os.geteuid() == 0 and has_nobody()
  # Only the parent, outside the new user namespace, may write the id maps: the child signals that the namespace exists,
  # and waits for the maps.
  entered = os.pipe()
  mapped = os.pipe()
  child = os.fork()
  if child:
    os.close(entered[1])
    os.close(mapped[0])
    if os.read(entered[0], 1):
      map_ids(child, root)
      os.write(mapped[1], b'+')
    os.close(mapped[1])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  os.close(mapped[1])

  def process_1() -> int:
    mount_root(binds, work)
    serve(root)
    return 0

  exit_with(lambda: enter(process_1, entered[1], mapped[0]))


def has_nobody() -> bool:
  """Returns whether this user namespace maps NOBODY_ID, so that root can switch to it."""
  with open('/proc/self/setgroups') as file:
    if file.read().strip() != 'allow':
      return False
  with open('/proc/self/uid_map') as file:
    ranges = [tuple(map(int, line.split())) for line in file]
  return any(first <= NOBODY_ID < first + count for first, _, count in ranges)


def exit_with(function: Callable[[], int]) -> NoReturn:
  """Ends this process with the exit code of a function; errors are reported to sandbox.py, not raised."""
  code = 1
  try:
    code = function()
  except BaseException as error:  # A forked copy must never return into its caller's code.
    report({'setup': text_of(error)})
  finally:
    os._exit(code)


def text_of(error: BaseException) -> str:
  """Returns the text of an error for a report."""
  return str(error) if isinstance(error, OSError) else repr(error)


def map_ids(pid: int, root: bool) -> None:
  """Writes the uid and gid maps of a child's user namespace.

  With `root`, host root is root inside, so that it can mount, and can drop to NOBODY_ID; otherwise the calling user is
  NOBODY_ID inside.
  """
  uid, gid = os.geteuid(), os.getegid()
  lines = {
    'setgroups': 'allow' if root else 'deny',
    'uid_map': f'0 0 1\n{NOBODY_ID} {NOBODY_ID} 1' if root else f'{NOBODY_ID} {uid} 1',
    'gid_map': f'0 0 1\n{NOBODY_ID} {NOBODY_ID} 1' if root else f'{NOBODY_ID} {gid} 1',
  }
  for name, text in lines.items():
    try:
      with open(f'/proc/{pid}/{name}', 'w') as file:
        file.write(text)
    except OSError as error:
      os.kill(pid, signal.SIGKILL)
      raise OSError(error.errno, f'{name}: {error.strerror}') from error


def enter(process_1: Callable[[], int], entered: int, mapped: int) -> int:
  """Creates the namespaces and forks their process 1; returns its exit code.

  Args:
    entered: pipe to write to when the namespaces exist.
    mapped: pipe that carries a byte when the user ids are mapped.
  """
  check(libc.unshare(sum(_NEW.values())), f'unshare({", ".join(_NEW)})')
  os.write(entered, b'+')
  if not os.read(mapped, 1):
    return 1  # The parent has reported why.
  die_with_parent()
  child = os.fork()  # unshare moves only later children into the new pid namespace.
  if child:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255
  die_with_parent()
  limit_namespaces()
  return process_1()


def die_with_parent(sign: int = signal.SIGKILL) -> None:
  """Has the kernel send a signal to this process when its parent ends (Linux only)."""
  if sys.platform == 'linux':
    check(libc.prctl(_PR_SET_PDEATHSIG, sign), 'prctl')


def become_subreaper() -> None:
  """Makes orphans among the descendants children of this process."""
  check(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 'prctl(PR_SET_CHILD_SUBREAPER)')


def new_keyring() -> None:
  """Replaces the session keyring, which may hold keys of the user, with an empty one.

  Failure is ignored: if this call is refused here, programs cannot make calls for keys either.
  """
  if number := _SYS_KEYCTL.get(platform.machine()):
    libc.syscall(number, _JOIN_SESSION_KEYRING, None)


def new_ipc() -> None:
  """Moves this process into an ipc namespace of its own."""
  check(libc.unshare(_NEW['ipc']), 'unshare(ipc)')


def limit_namespaces() -> None:
  """Forbids further namespaces inside, and makes the processes the first victims when memory runs out.

  Both are defense in depth: in a container /proc may be read-only, and failure is ignored.
  """
  for path, text in (('/proc/sys/user/max_user_namespaces', '0'), ('/proc/self/oom_score_adj', '1000')):
    with contextlib.suppress(OSError), open(path, 'w') as file:
      file.write(text)


def mount(source: str, target: str, kind: str, flags: int, options: str = '') -> None:
  """Calls mount(2); OSError if it fails."""
  check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f'mount {target}')


def mount_tmpfs(target: str, options: str) -> None:
  """Mounts an empty file system in memory, without devices and setuid files."""
  mount('tmpfs', target, 'tmpfs', _MS_NOSUID | _MS_NODEV, options)


def unmount(target: str) -> None:
  """Detaches a mount, even one that is in use."""
  check(libc.umount2(target.encode(), _MNT_DETACH), f'umount {target}')


def no_new_privileges() -> None:
  """Makes setuid and file capabilities ineffective for this process and its children, for good."""
  check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 'prctl')


def read_only(path: str, flags: int = _AT_RECURSIVE) -> None:
  """Makes a mount, by default with all mounts below it, read-only and without setuid files."""
  attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)  # struct mount_attr
  size = ctypes.sizeof(attributes)
  result = libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size)
  check(result, f'mount_setattr {path}')


def mount_root(binds: Iterable[str], work: str) -> None:
  """Replaces the root file system with a small one and detaches the old root."""
  # Private: no mount made here propagates to the host.
  mount('none', '/', '', _MS_REC | _MS_PRIVATE)
  root = '/proc'  # Any folder serves as the mount point; this one always exists.
  mount_tmpfs(root, 'size=4m,nr_inodes=4096,mode=755')
  os.umask(0o022)
  os.makedirs(root + work)
  for path in (*_SYSTEM, *binds, *_DEVICES):
    bind(path, root + path)
  for path in ('/tmp', '/dev/shm'):
    if not os.path.lexists(root + path):
      os.symlink(work, root + path)
  os.chdir(root)
  check(libc.pivot_root(b'.', b'.'), 'pivot_root')
  # pivot_root('.', '.') stacks the old root on the new one; detaching it leaves no path to the host's files.
  unmount('.')
  os.chdir('/')
  read_only('/', 0)


def bind(path: str, target: str) -> None:
  """Mounts a path of the host at `target`, read-only unless it is a device; copies a symbolic link as it is."""
  if not os.path.lexists(path) or os.path.lexists(target):
    return
  os.makedirs(os.path.dirname(target), exist_ok=True)
  if os.path.islink(path):
    os.symlink(os.readlink(path), target)
    return
  if os.path.isdir(path):
    os.mkdir(target)
  else:
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
  mount(path, target, '', _MS_BIND | _MS_REC)
  if not path.startswith('/dev/'):
    read_only(target)
