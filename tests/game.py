"""An environment of learning.py, in a file of its own: its workers import it."""

from jaxpost.environments import examples


class Game(examples.Treasure):
  """The treasure of docs/environments.md, whose moves are rewarded: 0.5 for one in the right direction."""

  turn_reward = 0.0

  def move(self, direction: str) -> str:
    """
    Goes to the next room.

    Args:
      direction: Either left or right.

    Returns:
      What there is to see.
    """
    distance = abs(self.treasure - self.room)
    seen = super().move(direction)
    self.turn_reward = 0.5 * (abs(self.treasure - self.room) < distance)
    return seen
