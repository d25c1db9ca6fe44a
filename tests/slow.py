"""Writes tests/slow.txt: the tests that a plain `pytest` leaves to CI.

    CI=true pytest --junitxml=all.xml && python tests/slow.py all.xml

lists every test that took longer than LIMIT seconds. A slow fixture counts for the
first test that uses it; list the others by hand.
"""

import pathlib
import sys
from xml.etree import ElementTree

LIMIT = 3.0  # seconds, on 2 cores


def main():
  found = []
  for case in ElementTree.parse(sys.argv[1]).iter('testcase'):
    if float(case.get('time', 0)) > LIMIT:
      file = case.get('classname').replace('.', '/') + '.py'
      found.append(f'{file}::{case.get("name")}')
  pathlib.Path(__file__).with_name('slow.txt').write_text('\n'.join(sorted(found)) + '\n', 'utf-8')
  print(f'{len(found)} tests took longer than {LIMIT:g} s')


if __name__ == '__main__':
  main()
