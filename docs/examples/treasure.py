"""A small text game: find the treasure in a row of rooms, step by step.

For rows with `start`, `treasure` (room numbers) and a `prompt` that says how
to play. The first observation says where the player stands.
"""


class Treasure:
  """A game; as TRL's `environment_factory` makes them."""

  def reset(self, start, treasure, **row):
    """Puts the player into a room; what he sees is added to the prompt."""
    self.room, self.treasure, self.moves = int(start), int(treasure), 0
    return f' You are in room {self.room}. {self._hint()}'

  def move(self, direction: str) -> str:
    """
    Goes to the next room.

    Args:
      direction: "left" or "right"

    Returns:
      What there is to see.
    """
    if self.room == self.treasure:
      raise ValueError('The treasure is found; say that you are done.')
    if direction not in ('left', 'right'):
      raise ValueError('The direction is left or right.')
    self.room += 1 if direction == 'right' else -1
    self.moves += 1
    return f'You are in room {self.room}. {self._hint()}'

  def get_reward(self):
    """1 for the treasure, less 0.05 for each move; 0 without."""
    return max(0.0, 1 - 0.05 * self.moves) * (self.room == self.treasure)

  def _hint(self):
    if self.room == self.treasure:
      return 'The treasure is here!'
    side = 'right' if self.treasure > self.room else 'left'
    return f'It shines from the {side}.'
