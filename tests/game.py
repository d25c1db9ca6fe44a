"""An environment of learning.py, in a file of its own: its workers import it."""

import functools

from jaxpost.environments import examples


class Game(examples.Treasure):
  """The treasure of docs/environments.md, whose moves are rewarded: 0.5 for one in the right direction."""

  turn_reward = 0.0

  @functools.wraps(examples.Treasure.move)  # whose signature and docstring are the schema of the tool
  def move(self, direction):
    distance = abs(self.treasure - self.room)
    seen = super().move(direction)
    self.turn_reward = 0.5 * (abs(self.treasure - self.room) < distance)
    return seen
