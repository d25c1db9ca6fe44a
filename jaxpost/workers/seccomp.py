"""A filter of system calls for programs of the sandbox, which can make only the calls that are listed here.

The list has what an interpreter with threads, child processes, files, sockets and timers uses. Everything else fails
with ENOSYS, for which C libraries have fallbacks: keys of the kernel (keyctl), io_uring, bpf, ptrace, userfaultfd,
namespaces and mounts, System V shared memory and memory files (memfd_create), which no limit would count, and clone3,
whose flags a filter cannot read. A process can change only its own resource limits. Sockets are local (AF_UNIX) or of
IP, in a network that has no interface.

seccomp(2), Documentation/userspace-api/seccomp_filter.rst.
"""

import ctypes
import errno
import functools
import platform
import struct

from jaxpost.workers import namespaces

# name:x86_64:aarch64, from asm/unistd_64.h and asm-generic/unistd.h; '-' where an architecture has no such call.
_CALLS = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 ioctl:16:29 pread64:17:67
pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216
msync:26:227 mincore:27:232 madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:-
setitimer:38:103 getpid:39:172 sendfile:40:71 socket:41:198 connect:42:203 accept:43:202 sendto:44:206 recvfrom:45:207
sendmsg:46:211 recvmsg:47:212 shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204 getpeername:52:205
socketpair:53:199 setsockopt:54:208 getsockopt:55:209 clone:56:220 fork:57:- vfork:58:- execve:59:221 exit:60:93
wait4:61:260 kill:62:129 uname:63:160 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45
ftruncate:77:46 getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:-
link:86:- unlink:87:- symlink:88:- readlink:89:- chmod:90:- fchmod:91:52 chown:92:- fchown:93:55 lchown:94:-
umask:95:166 gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174
getgid:104:176 geteuid:107:175 getegid:108:177 setpgid:109:154 getppid:110:173 getpgrp:111:- setsid:112:157
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getsid:124:156 capget:125:90
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138 rt_sigsuspend:130:133 sigaltstack:131:132
utime:132:- statfs:137:43 fstatfs:138:44 getpriority:140:141 setpriority:141:140 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127
mlock:149:228 munlock:150:229 prctl:157:167 arch_prctl:158:- setrlimit:160:164 gettid:186:178 tkill:200:130 time:201:-
futex:202:98 sched_setaffinity:203:122 sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61
set_tid_address:218:96 restart_syscall:219:128 fadvise64:221:223 timer_create:222:107 timer_settime:223:110
timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 clock_gettime:228:113 clock_getres:229:114
clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 tgkill:234:131 utimes:235:- waitid:247:95
openat:257:56 mkdirat:258:34 fchownat:260:54 futimesat:261:- newfstatat:262:79 unlinkat:263:35 renameat:264:38
linkat:265:37 symlinkat:266:36 readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73
set_robust_list:273:99 get_robust_list:274:100 splice:275:76 tee:276:77 sync_file_range:277:84 utimensat:280:88
epoll_pwait:281:22 signalfd:282:- timerfd_create:283:85 eventfd:284:- fallocate:285:47 timerfd_settime:286:86
timerfd_gettime:287:87 accept4:288:242 signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59
preadv:295:69 pwritev:296:70 rt_tgsigqueueinfo:297:240 recvmmsg:299:243 prlimit64:302:261 sendmmsg:307:269
getcpu:309:168 sched_getattr:315:275 renameat2:316:276 getrandom:318:278 membarrier:324:283 mlock2:325:284
copy_file_range:326:285 preadv2:327:286 pwritev2:328:287 statx:332:291 rseq:334:293 pidfd_send_signal:424:424
pidfd_open:434:434 close_range:436:436 faccessat2:439:439 epoll_pwait2:441:441 futex_waitv:449:449 fchmodat2:452:452
"""
_AUDIT = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h
_X32 = 0x40000000  # numbers from here on are those of the x32 ABI
_FAMILIES = 1, 2, 10  # AF_UNIX, AF_INET, AF_INET6
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW* of linux/sched.h
# Offsets in struct seccomp_data, and instructions of linux/filter.h and linux/seccomp.h
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
  """struct sock_fprog."""

  _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_char_p)]


def numbers(machine: str) -> dict[str, int]:
  """Returns {name: number} of the calls that exist on an architecture; OSError if it is not known."""
  if machine not in _AUDIT:
    raise OSError(errno.ENOSYS, f'no list of system calls for {machine}; there are {", ".join(_AUDIT)}')
  column = 1 + list(_AUDIT).index(machine)
  rows = [entry.split(':') for entry in _CALLS.split()]
  return {row[0]: int(row[column]) for row in rows if row[column] != '-'}


@functools.cache
def program(machine: str) -> bytes:
  """Returns the filter as BPF code, 8 bytes an instruction."""
  calls = numbers(machine)
  code = [
    (_LOAD, 0, 0, _ARCHITECTURE),
    (_EQUAL, 1, 0, _AUDIT[machine]),
    (_RETURN, 0, 0, _REFUSE),
    (_LOAD, 0, 0, _NUMBER),
    (_AT_LEAST, 0, 1, _X32),
    (_RETURN, 0, 0, _REFUSE),
  ]
  for name in ('socket', 'socketpair'):
    allowed = [step for family in _FAMILIES for step in ((_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW))]
    code += _of_call(calls.pop(name), [(_LOAD, 0, 0, _ARGUMENT), *allowed, (_RETURN, 0, 0, _REFUSE)])
  flags = [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
  code += _of_call(calls.pop('clone'), [(_LOAD, 0, 0, _ARGUMENT), *flags])
  # Only with pid 0, this process: process 1 of the jail may belong to the same user, and its limits must stay.
  own_limits = [(_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
  code += _of_call(calls.pop('prlimit64'), [(_LOAD, 0, 0, _ARGUMENT), *own_limits])
  for number in sorted(calls.values()):
    code += _of_call(number, [(_RETURN, 0, 0, _ALLOW)])
  code.append((_RETURN, 0, 0, _REFUSE))
  return b''.join(struct.pack('=HBBI', *step) for step in code)


def _of_call(number: int, steps: list[tuple]) -> list[tuple]:
  """Returns the filter of one call: other calls jump over the steps, which end with a return."""
  return [(_EQUAL, 0, len(steps), number), *steps]


def install() -> None:
  """Filters the system calls of this process and its children, for good; needs `namespaces.no_new_privileges`."""
  code = program(platform.machine())
  filter_program = _Program(len(code) // 8, code)
  result = namespaces.libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_program), 0, 0)
  namespaces.check(result, 'prctl(PR_SET_SECCOMP)')
