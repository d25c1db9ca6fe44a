"""A process alone in new Linux namespaces, made without privileges.

User, mount, pid, network, ipc and uts (unshare(2)); a root of its own. Linux
5.12 or newer. Imports nothing of jaxpost.
"""

import ctypes
import json
import os
import signal
import sys

NOBODY = 65534
# linux/sched.h, sys/mount.h, linux/mount.h, linux/prctl.h
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
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
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


def report(line):
  os.write(1, json.dumps(line).encode() + b'\n')  # a pipe that is read


def check(result, what):
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{what}: {os.strerror(number)}')


def isolated(serve, binds, work):
  """Calls serve(root) as process 1 of new namespaces; an exit code.

  Three processes: this one waits, the second makes the namespaces, the third
  is the first in them. The end of one ends those after it.

  Args:
    serve: a function; `root` says whether it may become NOBODY, else it is.
    binds: folders that stay visible, read-only, besides the system's.
    work: where an empty folder is wanted; all else is read-only.
  """
  root = os.geteuid() == 0 and has_nobody()
  asks, told = os.pipe(), os.pipe()
  child = os.fork()
  if child:
    os.close(asks[1])
    os.close(told[0])
    if os.read(asks[0], 1):  # it is in its user namespace
      map_ids(child, root)
      os.write(told[1], b'+')
    os.close(told[1])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  os.close(told[1])
  flags = 0
  for flag in _NEW.values():
    flags |= flag

  def first():
    mount_root(binds, work)
    serve(root)
    return 0

  leave(lambda: enter(first, flags, asks[1], told[0]))


def has_nobody():
  """Whether there is another user to become; not in every user namespace."""
  with open('/proc/self/setgroups') as file:
    if file.read().strip() != 'allow':
      return False
  with open('/proc/self/uid_map') as file:
    ranges = [tuple(map(int, line.split())) for line in file]
  return any(first <= NOBODY < first + count for first, _, count in ranges)


def leave(function):
  """Ends this process with the function; errors are reported, not raised."""
  code = 1
  try:
    code = function()
  except BaseException as error:  # this copy of the process goes no further
    report({'setup': text_of(error)})
  finally:
    os._exit(code)


def text_of(error):
  return str(error) if isinstance(error, OSError) else repr(error)


def map_ids(pid, root):
  """Root is root there, too, to mount; others are only nobody."""
  uid, gid = os.geteuid(), os.getegid()
  lines = {
    'setgroups': 'allow' if root else 'deny',
    'uid_map': f'0 0 1\n{NOBODY} {NOBODY} 1' if root else f'{NOBODY} {uid} 1',
    'gid_map': f'0 0 1\n{NOBODY} {NOBODY} 1' if root else f'{NOBODY} {gid} 1',
  }
  for name, text in lines.items():
    try:
      with open(f'/proc/{pid}/{name}', 'w') as file:
        file.write(text)
    except OSError as error:
      os.kill(pid, signal.SIGKILL)
      raise OSError(error.errno, f'{name}: {error.strerror}') from error


def enter(first, flags, asks, told):
  if libc.unshare(flags) < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'unshare({", ".join(_NEW)}): {os.strerror(number)}')
  os.write(asks, b'+')
  if not os.read(told, 1):
    return 1  # the first process has reported why
  die_with_parent()
  child = os.fork()  # only children are in the new pid namespace
  if child:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255
  die_with_parent()
  limit_namespaces()
  return first()


def die_with_parent():
  if sys.platform == 'linux':
    check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), 'prctl')


def limit_namespaces():
  """No namespaces within, no last place when memory runs out, if allowed.

  /proc may be read-only in a container; neither is what the sandbox rests on.
  """
  for path, text in (('/proc/sys/user/max_user_namespaces', '0'), ('/proc/self/oom_score_adj', '1000')):
    try:
      with open(path, 'w') as file:
        file.write(text)
    except OSError:
      pass


def mount(source, target, kind, flags, options=''):
  check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f'mount {target}')


def mount_tmpfs(target, options):
  mount('tmpfs', target, 'tmpfs', _MS_NOSUID | _MS_NODEV, options)


def unmount(target):
  check(libc.umount2(target.encode(), _MNT_DETACH), f'umount {target}')


def no_new_privileges():
  check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 'prctl')


def read_only(path, flags=_AT_RECURSIVE):
  wanted = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
  check(
    libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(wanted), ctypes.sizeof(wanted)),
    f'mount_setattr {path}',
  )


def mount_root(binds, work):
  """A new, small root: system and interpreter read-only, and devices."""
  mount('none', '/', '', _MS_REC | _MS_PRIVATE)
  root = '/proc'  # any folder does; this one is always there
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
  unmount('.')  # the old root, which lies below the new one
  os.chdir('/')
  read_only('/', 0)


def bind(path, target):
  if not os.path.lexists(path) or os.path.lexists(target):
    return
  if os.path.islink(path):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.symlink(os.readlink(path), target)
    return
  if os.path.isdir(path):
    os.makedirs(target)
  else:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
  mount(path, target, '', _MS_BIND | _MS_REC)
  if not path.startswith('/dev/'):
    read_only(target)
