"""TODO."""

import numpy as np


def same_shape(what: str, rank: int | None, *arrays):
  """ValueError unless all have one shape, and `rank` axes if that is given.

  `what` names arrays and axes in the message, such as 'rewards, valid [N, G]'.
  """
  shapes = [np.shape(a) for a in arrays]
  if len(set(shapes)) > 1 or rank not in (None, len(shapes[0])):
    raise ValueError(f'{what}: shapes are {", ".join(map(str, shapes))}')
