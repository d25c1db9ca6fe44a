"""The measurements of `launch.bench accelerator`, most important first."""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
  """One measurement.

  measure: 'module:function' in this package.
  seconds: time limit.
  given: arguments of the function; with `tiny`, those in TINY are replaced.
  tiny_preset: replaces the argument `preset` at tiny sizes.
  """

  measure: str
  seconds: float
  given: dict[str, Any] = dataclasses.field(default_factory=dict)
  tiny_preset: str = 'tiny'

  def run(self, tiny: bool) -> dict[str, Any]:
    """Returns the figures of this row."""
    module, _, function = self.measure.partition(':')
    given = self.given
    if tiny:
      smaller = TINY | {'preset': self.tiny_preset}
      given = {k: smaller.get(k, v) for k, v in given.items()}
    return getattr(importlib.import_module(f'.{module}', __package__), function)(**given)


# Arguments of all rows at sizes for a CPU, which takes a second: they only test that the code runs.
TINY = dict(
  size=64,
  kernel_length=64,
  layers=1,
  rows=2,
  micro=2,
  row_length=64,
  steps=1,
  slots=2,
  length=64,
  block=4,
  prompts=2,
  group=2,
  prompt=16,
  new=8,
  head_elements=2**12,
  contexts=(16, 32),
  rank=2,
)


def _sft(preset: str, seconds: float = 240, tiny_preset: str = 'tiny', **given: Any) -> Row:
  sizes = dict(preset=preset, layers=0, rows=8, row_length=4096, steps=8)
  return Row('training:sft', seconds, sizes | given, tiny_preset)


def _decode(slots: int, length: int, preset: str = 'qwen3_1_7b', tiny_preset: str = 'tiny', **given: Any) -> Row:
  sizes = dict(preset=preset, layers=0, slots=slots, length=length, block=32)
  return Row('decoding:decode', 150, sizes | given, tiny_preset)


def _on_policy(algorithm: str, seconds: float, **given: Any) -> Row:
  sizes = dict(preset='qwen3_1_7b', layers=0, prompts=64, group=8, prompt=256, new=512, steps=2)
  return Row('training:on_policy', seconds, dict(algorithm=algorithm) | sizes | given)


def _repeat(**given: Any) -> Row:
  sizes = dict(preset='qwen3_0_6b', layers=4, rows=8, row_length=2048, steps=3)
  return Row('training:repeat', 180, sizes | given)


_BIG = 'qwen3_1_7b'
ROWS = {
  'versions': Row('chip:versions', 60),
  'rates': Row('chip:rates', 120, dict(size=0)),
  'options': Row('chip:compiler_options', 60),
  'kernels': Row('chip:kernels', 420, dict(kernel_length=4096)),
  'decode/qwen3_1_7b/32x512': _decode(32, 512),
  'sft/qwen3_1_7b': _sft(_BIG),
  'mismatch/qwen3_1_7b': Row(
    'decoding:mismatch', 240, dict(preset=_BIG, layers=0, contexts=(128, 512, 2048, 4096, 8192), new=64)
  ),
  'grpo/qwen3_1_7b': _on_policy('grpo', 540),
  'decode/qwen3_1_7b/128x1024': _decode(128, 1024),
  'decode/qwen3_1_7b/1x512': _decode(1, 512),
  'sft/qwen3_1_7b/remat=full': _sft(_BIG, remat='full'),
  'sft/qwen3_1_7b/remat=none': _sft(_BIG, remat='none', rows=4),
  'sft/qwen3_1_7b/attention=chunked': _sft(_BIG, attention='chunked'),
  'sft/qwen3_1_7b/head=quarter': _sft(_BIG, head_elements=2**28),
  'sft/qwen3_1_7b/long_documents': _sft(_BIG, documents=2000),
  'prefill/qwen3_1_7b/64x512': Row('decoding:prefill', 120, dict(preset=_BIG, layers=0, prompts=64, length=512)),
  'moves/qwen3_1_7b/128x1024': Row('decoding:moves', 150, dict(preset=_BIG, layers=0, slots=128, length=1024)),
  'bits': _repeat(),
  'bits/deterministic': _repeat(deterministic=True),
  'sft/llama3_2_3b': _sft('llama3_2_3b', rows=4),
  'sft/qwen3_0_6b': _sft('qwen3_0_6b'),
  'sft/llama3_2_1b': _sft('llama3_2_1b'),
  'sft/qwen3_5_0_8b': _sft('qwen3_5_0_8b', tiny_preset='tiny_hybrid'),
  'sft/qwen3_5_0_8b/recurrence=xla': _sft('qwen3_5_0_8b', tiny_preset='tiny_hybrid', recurrence_kernel=False),
  'decode/qwen3_5_0_8b/256x1024': _decode(256, 1024, 'qwen3_5_0_8b', 'tiny_hybrid'),
  'lora/qwen3_8b': _sft('qwen3_8b', rows=4, rank=16, seconds=300),
  'decode/qwen3_1_7b/32x8192': _decode(32, 8192),
  'decode/qwen3_1_7b/256x1024': _decode(256, 1024),
  'decode/qwen3_1_7b/32x2048': _decode(32, 2048),
  'decode/qwen3_1_7b/1x8192': _decode(1, 8192),
  'decode/qwen3_1_7b/32x512/top_p': _decode(32, 512, top_p=0.95),
  'decode/qwen3_1_7b/32x512/block=8': _decode(32, 512, block=8),
  'moe/qwen3_30b_a3b/4_layers': _sft('qwen3_30b_a3b', tiny_preset='tiny_moe', layers=4, rows=2),
  'moe_decode/qwen3_30b_a3b/4_layers': _decode(32, 512, 'qwen3_30b_a3b', 'tiny_moe', layers=4),
  'dpo/qwen3_1_7b': _sft(_BIG, algorithm='dpo', rows=4, row_length=4096, seconds=300),
  'grpo/qwen3_1_7b/slots=256': _on_policy('grpo', 420, slots=256),
  'grpo/qwen3_1_7b/micro=44': _on_policy('grpo', 420, micro=44),
  'grpo/qwen3_1_7b/share_prompt': _on_policy('grpo', 420, share=True),
  'ppo/qwen3_0_6b': _on_policy('ppo', 420, preset='qwen3_0_6b', prompts=16),
}


def chosen(names: str) -> dict[str, Row]:
  """Returns the rows in a comma-separated list, in the order of ROWS; a name also means all rows below it.

  Args:
    names: for example 'rates,decode' or 'sft/qwen3_1_7b'; '': all.

  Raises:
    ValueError: no row has one of the names.
  """
  chosen_names = [name for name in names.split(',') if name]
  for name in chosen_names:
    if not any(_below(name, row) for row in ROWS):
      raise ValueError(f'there is no row {name!r}; the rows are {", ".join(ROWS)}')
  return {k: row for k, row in ROWS.items() if not chosen_names or any(_below(name, k) for name in chosen_names)}


def _below(name: str, row: str) -> bool:
  return row == name or row.startswith(name + '/')
