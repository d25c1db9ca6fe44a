"""A page as a browser renders it, for the tests of the report, the comparison and the viewer."""

import os
import shutil
import subprocess

import pytest

_NAMES = ('chromium', 'chromium-browser', 'google-chrome')


def rendered(url: str, profile) -> str:
  """Returns the document of a page after its scripts have run, as HTML.

  Args:
    url: of a file or a server of this machine.
    profile: folder for what the browser keeps.

  Skips the test where no browser is installed. In CI with JAXPOST_CI_BROWSER=1, which promises one, the test fails.
  """
  found = next((path for path in map(shutil.which, _NAMES) if path), None)
  if not found:
    missing = f'no browser is installed: none of {", ".join(_NAMES)} is on PATH; on Debian, apt-get install chromium'
    if os.environ.get('CI') == 'true' and os.environ.get('JAXPOST_CI_BROWSER') == '1':
      pytest.fail(missing)
    pytest.skip(missing)
  options = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', f'--user-data-dir={profile}']
  command = [found, *options, '--virtual-time-budget=2000', '--dump-dom', url]
  done = subprocess.run(command, text=True, capture_output=True, timeout=300)
  assert done.returncode == 0 and '<html' in done.stdout, done.stderr[-2000:]
  return done.stdout
