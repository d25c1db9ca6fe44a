"""Arguments of config files: `--config=configs/x.py:model=xs,runlocal`."""

import types

from jaxpost.errors import InputError, did_you_mean


def parse_arg(arg: str | None, **options: bool | int | float | str) -> types.SimpleNamespace:
  """Parses the text after the colon of `--config=x.py:model=xs,runlocal`.

  Args:
    arg: the text; a bare name means True.
    options: {name: default} of the arguments that the config file takes.

  Returns:
    An object with these attributes.

  Raises:
    InputError: a name is not known, or its value is of another type.
  """
  values = dict(options)
  for item in filter(None, (arg or '').split(',')):
    name, has_value, value = item.partition('=')
    if name not in options:
      hint = did_you_mean(name, options).strip() or f'known: {", ".join(options)}'
      raise InputError(f'--config: no argument {name!r}; {hint}')
    kind = type(options[name])
    if kind is bool:
      value = value if has_value else 'true'
      if value.lower() not in ('true', 'false', '1', '0'):
        raise InputError(f'--config: {name}={value} must be true or false')
      values[name] = value.lower() in ('true', '1')
    else:
      try:
        values[name] = kind(value)
      except ValueError:
        raise InputError(f'--config: {name}={value!r} is not of type {kind.__name__}') from None
  return types.SimpleNamespace(**values)
