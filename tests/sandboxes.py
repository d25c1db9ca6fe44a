"""Whether this kernel allows the namespaces of the sandbox, found without code of the library."""

import subprocess
import sys

import pytest

_UNSHARE = 'import ctypes, sys\nsys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x20000) != 0)'
ALLOWED = sys.platform == 'linux' and not subprocess.run([sys.executable, '-c', _UNSHARE]).returncode
WHY_NOT = 'this kernel or container allows no user namespaces'
needs_namespaces = pytest.mark.skipif(not ALLOWED, reason=WHY_NOT)
