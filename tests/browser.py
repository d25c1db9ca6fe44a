"""Renders a page in headless Chromium, for the tests of the report, the run comparison and the rollout viewer."""

import os
import shutil
import subprocess

import pytest

_NAMES = ('chromium', 'chromium-browser', 'google-chrome')


def rendered(url: str, profile) -> str:
  """Returns the HTML of a page after its scripts have run.

  Skips the test if no browser is installed. In CI with JAXPOST_CI_BROWSER=1, which promises a browser, the test fails.

  Args:
    url: address of a file or of a server on this machine.
    profile: folder for the browser's profile.
  """
  browser = next((path for path in map(shutil.which, _NAMES) if path), None)
  if not browser:
    missing = f'no browser is installed: none of {", ".join(_NAMES)} is on PATH; on Debian, apt-get install chromium'
    if os.environ.get('CI') == 'true' and os.environ.get('JAXPOST_CI_BROWSER') == '1':
      pytest.fail(missing)
    pytest.skip(missing)
  options = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', f'--user-data-dir={profile}']
  command = [browser, *options, '--virtual-time-budget=2000', '--dump-dom', url]
  result = subprocess.run(command, text=True, capture_output=True, timeout=300)
  assert result.returncode == 0 and '<html' in result.stdout, result.stderr[-2000:]
  return result.stdout
