"""A page as a browser renders it, for the tests of the report and the viewer."""

import shutil
import subprocess

import pytest

_NAMES = ('chromium', 'chromium-browser', 'google-chrome')


def rendered(url: str, profile) -> str:
  """Returns the document of a page after its scripts have run, as HTML.

  Args:
    url: of a file or a server of this machine.
    profile: folder for what the browser keeps.

  Skips the test where no browser is installed.
  """
  found = next((path for path in map(shutil.which, _NAMES) if path), None)
  if not found:
    pytest.skip(f'no browser is installed: none of {", ".join(_NAMES)}')
  options = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', f'--user-data-dir={profile}']
  command = [found, *options, '--virtual-time-budget=2000', '--dump-dom', url]
  done = subprocess.run(command, text=True, capture_output=True, timeout=300)
  assert done.returncode == 0 and '<html' in done.stdout, done.stderr[-2000:]
  return done.stdout
