"""The game of configs/text_game.py with a reward for each move, for methods that learn from rewards of turns."""

import functools

from jaxpost.environments.examples import Treasure


class ScoredTreasure(Treasure):
  """A move toward the treasure has the reward 0.1, and a move away from it -0.1."""

  turn_reward = 0.0

  @functools.wraps(Treasure.move)  # its docstring describes the tool to the model
  def move(self, direction: str) -> str:
    before = abs(self.treasure - self.room)
    view = super().move(direction)
    self.turn_reward = 0.1 * (before - abs(self.treasure - self.room))
    return view
