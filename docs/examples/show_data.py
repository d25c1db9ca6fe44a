"""Shows data with a tiny random model, whose tokens are bytes; see docs/data_formats.md.

python -m launch.inspect --config=docs/examples/show_data.py --config.data.path=FILE
"""

import ml_collections

from jaxpost import defaults


def get_config():
  config = ml_collections.ConfigDict(defaults())
  config.reward = 'exact_match'  # of the methods that sample; reads the column answer
  return config
