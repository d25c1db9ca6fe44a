"""Writes docs/quickstart.png and docs/viewer.png from a run of the quickstart; needs Chromium and no device.

python docs/make_pictures.py runs/quickstart
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZES = {'quickstart': '1400,1000', 'viewer': '1400,800'}  # of the window, in pixels
# The report begins with SFT; its picture goes on with GRPO, so that one screen has the result.
WITHOUT_SFT = '<style>#sft, #sft ~ *:not(#grpo, #grpo ~ *) { display: none }</style>'
WRONG_ANSWERS = '#stage=grpo&split=eval&step=120&only=wrong'


def write_picture(name: str, page: str, folder: str) -> None:
  """Writes docs/NAME.png, what Chromium shows of a page; its profile is in `folder`."""
  options = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--virtual-time-budget=3000']
  options += [f'--user-data-dir={folder}/profile', f'--window-size={SIZES[name]}']
  subprocess.run(['chromium', *options, f'--screenshot={ROOT / "docs" / name}.png', page], check=True)


def main(run: pathlib.Path) -> None:
  """Writes both pictures of a run folder."""
  with tempfile.TemporaryDirectory() as folder:
    report, viewer = pathlib.Path(folder, 'report.html'), pathlib.Path(folder, 'viewer.html')
    report.write_text((run / 'report.html').read_text() + WITHOUT_SFT)
    write_picture('quickstart', report.as_uri(), folder)
    command = [sys.executable, '-m', 'launch.view', f'--run={run.resolve()}', f'--out={viewer}', '--most=100000']
    subprocess.run(command, cwd=ROOT, check=True)
    data = json.loads(re.search(r'const DATA = (.*);\n', viewer.read_text())[1])
    last = [e['short'] for e in data['episodes'] if (e['short']['split'], e['short']['step']) == ('eval', 120)]
    episode = next(e['id'] for e in last if e['stage'] == 'grpo' and e['reward'] == 0)
    write_picture('viewer', f'{viewer.as_uri()}{WRONG_ANSWERS}&id={episode}', folder)


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
