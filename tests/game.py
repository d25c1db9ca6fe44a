"""The environment `Game` of learning.py, in a file of its own because environment workers import it by path."""

import functools

from jaxpost.environments import examples


class Game(examples.Treasure):
  """The treasure hunt of docs/environments.md, with a turn reward of 0.5 for each move toward the treasure."""

  turn_reward = 0.0

  @functools.wraps(examples.Treasure.move)  # keeps its signature and docstring, which are the schema of the tool
  def move(self, direction):
    distance = abs(self.treasure - self.room)
    observation = super().move(direction)
    self.turn_reward = 0.5 * (abs(self.treasure - self.room) < distance)
    return observation
