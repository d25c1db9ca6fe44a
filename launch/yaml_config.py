"""The config file that `--config=my.yaml` stands for, as `--config=yaml_config.py:my.yaml`."""

import ml_collections

import jaxpost


def get_config(path):
  """Returns the config in a YAML file, see `jaxpost.load_config`."""
  return ml_collections.ConfigDict(jaxpost.load_config(path))
