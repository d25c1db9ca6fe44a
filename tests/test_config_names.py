"""Config fields that were renamed (`stage.field_names`): the old name is refused, and the message has the new one."""

import json
import pathlib
import tomllib

import pytest
import rich.console

from jaxpost.errors import InputError
from jaxpost.stage import config as config_lib
from jaxpost.stage import field_names, resumed_run


def nested(path, value=1):
  """Returns {'a': {'b': value}} for 'a.b'."""
  for part in reversed(path.split('.')):
    value = {part: value}
  return value


FORMER = tomllib.loads(pathlib.Path(field_names.__file__).with_suffix('.toml').read_text('utf-8'))['former']


@pytest.mark.parametrize('old', FORMER)
def test_an_old_name_is_refused_with_the_new_one(old):
  new = FORMER[old]
  with pytest.raises(InputError, match=rf'^config\.{old}: unknown key; did you mean config\.{new}\?$'):
    config_lib.parse(nested(old))
  with pytest.raises(InputError, match=rf'^config\.grpo\.{old}: unknown key; did you mean config\.grpo\.{new}\?$'):
    config_lib.parse(dict(stages=('grpo',), grpo=nested(old)))


@pytest.mark.parametrize('old, new', FORMER.items())
def test_new_names_are_fields_and_old_ones_are_not(old, new):
  assert field_names.field_type(new) and not field_names.field_type(old)


def test_a_run_of_an_older_version_is_refused_with_one_line(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(nested('rollout.lag') | {'algorithm': 'grpo'}))
  configs = config_lib.parse({})
  with pytest.raises(InputError, match='was written by another version of jaxpost') as caught:
    resumed_run.check_config(tmp_path, configs, rich.console.Console())
  message = str(caught.value)
  assert '\n' not in message and str(tmp_path / 'config.json') in message
  assert 'did you mean config.rollout.staleness?' in message and 'another --workdir' in message
