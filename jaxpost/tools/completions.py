"""Completions of a list of prompts from trained weights.

Legend: n samples per prompt, P prompt tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import rich.console
import rich.text
from etils import epath

from jaxpost.data import prompts as prompts_lib
from jaxpost.data import sources
from jaxpost.distributed.phases import make_layout
from jaxpost.errors import InputError
from jaxpost.hardware import chips
from jaxpost.matmul import compute_for
from jaxpost.models import shared_weights
from jaxpost.programs.compile import Ledger
from jaxpost.rollout import sampler_config
from jaxpost.rollout.buckets import bucket
from jaxpost.rollout.native import NativeEngine, SamplerConfig
from jaxpost.stage import model_limits, on_policy
from jaxpost.tools.inference import Weights, adapters, merged, where_started
from jaxpost.tools.working import working
from jaxpost.types import Prompt, Rollout

if TYPE_CHECKING:
  from jaxpost.data.tokenizer import Tokenizer
  from jaxpost.stage import schema


_SLOTS = 64  # largest number of sequences at a time
_LOOKED_AT = 100  # largest number of rows to read until the map keeps one
_ASKING = ('messages', 'prompt', 'text', 'chosen')  # columns that show whether data is chats or plain text


def make_prompts(
  weights: Weights,
  texts: Sequence[str] = (),
  file: str = '',
  as_chat: bool | None = None,
  tell: Callable[[str], Any] = str,
) -> list[Prompt]:
  """Returns the prompts of the rows of `file`, then of `texts`.

  Args:
    weights: those whose tokenizer is used.
    texts: one prompt each.
    file: any data with the column prompt, messages, prompt_ids or text.
    as_chat: True makes a text a user's message, False lets the model continue it; None reads rows of `file` as in
      training, and `texts` by `typed_as_chat`.
    tell: gets a line on how text is read if as_chat is None and the tokenizer has a chat template.
  """
  ambiguous = as_chat is None and weights.inputs.tokenizer.chat_template
  prompts = prompts_of(weights, read_whole(file), bool(as_chat)) if file else []
  if ambiguous and any(isinstance(p.prompt, str) and p.columns.get('prompt_ids') is None for p in prompts):
    tell(f'{file}: its plain text is continued as it is; --chat makes each text a message')
  if not texts:
    return prompts
  typed = typed_as_chat(weights) if as_chat is None else as_chat
  if ambiguous and typed:
    tell("--prompt: is a user's message in the chat template; --nochat continues it as plain text")
  elif ambiguous:
    tell('--prompt: is continued as plain text, like the data of the run; --chat makes it a message')
  rows = sources.read('--prompt', fake_rows=[{'prompt': text} for text in texts])
  return prompts + prompts_of(weights, rows, typed, len(prompts))


def read_whole(path: str, columns: str = '', map_fn: str = '') -> sources.Rows:
  """Returns all rows of a data file, read at once; arguments as in `sources.read`."""
  with working(f'reading {path}'):
    rows = sources.read(path, columns, map_fn or None)
  assert isinstance(rows, sources.Rows)  # not streamed
  return rows


def typed_as_chat(weights: Weights) -> bool:
  """Returns whether `--prompt` is read as a user's message.

  It is if the tokenizer has a chat template, unless the weights are of a run on plain text.
  """
  if not weights.inputs.tokenizer.chat_template:
    return False
  if not (checkpoints := weights.inputs.sources['policy'].checkpoints):
    return True
  with where_started(checkpoints.parent.parent):
    return not _is_plain(weights.inputs.config.data)


def _is_plain(data: schema.DataSection) -> bool:
  """Returns whether the first row of `config.data` is plain text; False if it cannot be read without a download."""

  def first(option: Any) -> str:
    """Returns the option of the first source."""
    return next(iter(sources.split(option or '')), '')

  path = first(data.path)
  local = [p for p in (path, path.rpartition(':')[0]) if p and epath.Path(p).expanduser().exists()]
  if not (local or path.startswith('generated:')):
    return False
  for streaming in (True, False):  # not all formats can be streamed; large files should be
    try:
      rows = sources.read(path, first(data.columns), first(data.map) or None, streaming=streaming)
      row: dict[str, Any] = next((row for row in itertools.islice(rows, _LOOKED_AT) if row is not None), {})
    except InputError:
      continue
    return isinstance(next((row[k] for k in _ASKING if row.get(k) is not None), None), str)
  return False


def prompts_of(weights: Weights, rows: sources.Rows, as_chat: bool = False, start: int = 0) -> list[Prompt]:
  """Returns the prompts of rows, with indices from `start`; `as_chat` makes a text a user's message."""
  tokenizer = weights.inputs.tokenizer
  prompts: list[Prompt] = []
  for i in range(len(rows)):
    row, where = rows[i], rows.where(i)
    columns = row
    if 'text' in row and not {'prompt', 'messages'} & set(row):
      row = {'prompt': row['text']}  # a document of a .txt file
    text = row.get('prompt')
    if as_chat and isinstance(text, str):
      row = {**row, 'prompt': [{'role': 'user', 'content': text}]}
    if row.get('prompt_ids') is not None:
      tokens = check_ids(row['prompt_ids'], tokenizer, where)
      prompt = tokenizer.decode(tokens, skip_special=False)
    else:
      plain = isinstance(row.get('prompt'), str)
      prompt = prompts_lib.prompt_of(row, where, '' if plain else weights.inputs.config.data.system_prompt)
      tokens = prompts_lib.encode_prompt(tokenizer, prompt, row, where)
    prompts.append(Prompt(start + len(prompts), tokens, prompt, columns))
  return prompts


def check_ids(ids: Any, tokenizer: Tokenizer, where: str) -> np.ndarray:
  """Returns a row's `prompt_ids` as [P] int32; InputError if they are not a list of token ids."""
  size = tokenizer.vocab_size
  if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < size for i in ids):
    raise InputError(f'{where}: prompt_ids: must be a list of token ids below {size}')
  return np.asarray(ids, np.int32)


@dataclasses.dataclass(frozen=True)
class Draws:
  """Sampling settings of completions.

  temperature: 0 is greedy. top_k, top_p, min_p: 0, 1 and 0 are off. min_new_tokens, stop_strings: as in
  config.rollout. top_logprobs: number of most probable tokens reported at each position.
  """

  n: int = 1
  seed: int = 0
  max_new_tokens: int = 128
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  top_logprobs: int = 0
  min_p: float = 0.0
  min_new_tokens: int = 0
  stop_strings: tuple[str, ...] = ()


def complete(weights: Weights, prompts: Sequence[Prompt], draws: Draws = Draws(), mesh: str = 'data=-1') -> Rollout:
  """Samples `draws.n` completions of each prompt."""
  with working(f'sampling {len(prompts) * draws.n} completions'):
    return draw(engine_for(weights, prompts, draws, mesh), prompts, draws)


def engine_for(weights: Weights, prompts: Sequence[Prompt], draws: Draws, mesh: str) -> NativeEngine:
  """Returns a sampler that is large enough for these prompts, with as many slots as fit in memory."""
  max_prompt = max(len(prompt.tokens) for prompt in prompts)
  length, what = max_prompt + draws.max_new_tokens, '--max_new_tokens after the longest prompt'
  model_limits.warn_beyond(what, length, weights.inputs.model.config)
  make = functools.partial(
    make_engine,
    weights,
    max_prompt=max_prompt,
    max_new_tokens=draws.max_new_tokens,
    mesh=mesh,
    top_logprobs=draws.top_logprobs,
  )
  engine = make(slots=min(len(prompts) * draws.n, _SLOTS))
  # A decoding block copies up to the whole cache.
  slots = engine.max_concurrent_decodes
  share_of_need = sampler_config.free_bytes(engine.layout) / (2 * engine.cache_bytes() + 1)
  if share_of_need >= 1:
    return engine
  del engine  # frees its weights as well
  return make(slots=max(int(slots * share_of_need), 1))


def draw(engine: NativeEngine, prompts: Sequence[Prompt], draws: Draws) -> Rollout:
  """Samples completions with an engine that was made with `draws.max_new_tokens`."""
  return engine(
    prompts, group_size=draws.n, run_key=on_policy.run_key(draws.seed, 3), step=0, sampling=sampling_of(draws)
  )


def sampling_of(draws: Draws) -> dict:
  """Returns the sampling parameters of a request."""
  return dict(
    temperature=draws.temperature,
    top_k=draws.top_k,
    top_p=draws.top_p,
    min_p=draws.min_p,
    min_tokens=draws.min_new_tokens,
    stop_strings=draws.stop_strings,
    top_logprobs=draws.top_logprobs,
  )


def make_engine(
  weights: Weights,
  *,
  slots: int,
  max_prompt: int,
  max_new_tokens: int,
  mesh: str = 'data=-1',
  top_logprobs: int = 0,
  share_base: bool = False,
) -> NativeEngine:
  """Returns a sampler that holds these weights.

  Args:
    slots: sequences that are decoded at a time.
    max_prompt: tokens of the longest prompt.
    max_new_tokens: tokens of the longest completion.
    mesh: as config.mesh.rollout.
    top_logprobs: most probable tokens reported at each position.
    share_base: samples from these weights without copying them, which is slower.
  """
  inputs = weights.inputs
  model = inputs.model
  if model.head is None:
    raise InputError(f'{inputs.name}: is a reward model, which writes no text')
  if share_base:  # as nothing is trained here
    model = dataclasses.replace(model, frozen=frozenset(model.table))
  platform = jax.default_backend()
  compute = compute_for(platform, inputs.config.model.dtype, 'none', triton=not chips.before_ampere(jax.devices()[0]))
  layout = make_layout(mesh, 'rollout', '--mesh')
  if compute.uses_kernel:
    from jaxpost.hardware import kernel_check

    longest = max_prompt + max_new_tokens
    rows = [kernel_check.KernelUse(model.config, bucket(n, longest)) for n in range(1, longest + 1)]
    compute = kernel_check.verify(compute, rows, [model.config])
  if compute.grouped_kernel or compute.recurrence_kernel:
    from jaxpost.hardware import layer_check

    compute = layer_check.verify(compute, [model.config], [layout.mesh.shape['tensor']])
  reshard = None
  if share_base:
    reshard, model = shared_weights.share(model, layout)
  engine = NativeEngine(
    model,
    SamplerConfig(
      slots=slots,
      max_prompt=max_prompt,
      max_new_tokens=max_new_tokens,
      stop_ids=inputs.tokenizer.stop_ids,
      top_logprobs=top_logprobs,
    ),
    layout,
    compute,
    Ledger(announce=working.compiling),
    decode=functools.partial(inputs.tokenizer.decode, skip_special=False),
    reshard=reshard,
  )
  engine.load(weights.params, weights.step)
  return engine


def share_base(weights: Weights, name: str, folders: Sequence[str], mesh: str = 'data=-1') -> dict[str, Weights]:
  """Returns {name: weights} of a model and of its adapters, which share one base.

  The model's own adapter or quantized matrices are merged into the base.

  Args:
    folders: NAME=FOLDER of each adapter, as `inference.adapters` takes them.
    mesh: as config.mesh.rollout.
  """
  if folders:  # puts the base in the sampler's layout once for all engines
    weights = merged(weights)
    layout = make_layout(mesh, 'rollout', '--mesh')
    weights = dataclasses.replace(
      weights, layout=layout, params=jax.device_put(weights.params, weights.inputs.model.shardings(layout))
    )
  adapted = {adapter_name: adapter for adapter_name, adapter in adapters(weights, folders).items() if adapter_name}
  if name in adapted:
    raise InputError(f'--adapter: {name} is already the name of the model')
  return {name: weights} | adapted


def make_engines(
  models: Mapping[str, Weights],
  *,
  slots: int,
  max_prompt: int,
  max_new_tokens: int,
  mesh: str = 'data=-1',
  top_logprobs: int = 0,
) -> dict[str, NativeEngine]:
  """Returns {name: engine} of the models of `share_base`; further arguments as in `make_engine`."""
  for weights in models.values():
    model_limits.warn_beyond('--max_context', max_prompt + max_new_tokens, weights.inputs.model.config)
  return {
    name: make_engine(
      weights,
      slots=slots,
      max_prompt=max_prompt,
      max_new_tokens=max_new_tokens,
      mesh=mesh,
      top_logprobs=top_logprobs,
      share_base=len(models) > 1,
    )
    for name, weights in models.items()
  }


def completion_rows(rollout: Rollout, tokenizer: Tokenizer) -> list[dict]:
  """Returns one JSON-able row per completion."""
  rows = []
  size = rollout.group_size
  for i, length in enumerate(map(int, rollout.lengths)):
    prompt = rollout.prompts[i // size]
    rows.append(
      dict(
        prompt=prompt.prompt,
        sample=i % size,
        completion=text_after(tokenizer, prompt.tokens, rollout.completions[i, :length]),
        tokens=length,
        finished=bool(rollout.finished[i]),
        logprob=round(float(rollout.logprobs[i, :length].sum()), 4),
      )
    )
  return rows


def text_after(tokenizer: Tokenizer, prompt_ids: Iterable[int], ids: Iterable[int]) -> str:
  """Returns the text that a completion adds to its prompt.

  Some tokenizers drop the space at the beginning of a completion that is decoded alone.
  """
  prompt_text = tokenizer.decode(prompt_ids)
  full_text = tokenizer.decode([*prompt_ids, *ids])
  return full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else tokenizer.decode(ids)


def printer(n: int, as_json: bool) -> Callable[[dict], None]:
  """Returns a function that prints a row of `completion_rows`, of n samples per prompt."""
  return show_json if as_json else functools.partial(show, numbered=n > 1)


def show(row: dict, numbered: bool = False) -> None:
  """Prints a row of `completion_rows` as text: prompt and completion.

  Args:
    numbered: print numbers of completions, from 1, each in a new line, and the prompt with the first one only.
  """
  console = rich.console.Console(highlight=False, soft_wrap=True)
  prompt = row['prompt']
  text = prompt if isinstance(prompt, str) else prompt[-1]['content'] + '\n'
  head = (row.get('adapter', ''), 'bold'), (text, 'dim')
  if not numbered:
    console.print(rich.text.Text.assemble(*head, (row['completion'], 'green')))
    return
  if row['sample'] == 0:
    console.print(rich.text.Text.assemble(*head), end='' if text.endswith('\n') else '\n')
  console.print(rich.text.Text.assemble((f'{row["sample"] + 1}: ', 'bold'), (row['completion'], 'green')))


def show_json(row: dict) -> None:
  """Prints a row as one line of JSON."""
  print(json.dumps(row))


def only(each: dict[str, Weights], flag: str) -> Weights:
  """Returns the weights if they are of one model; InputError for several adapters."""
  if len(each) > 1:
    raise InputError(f'{flag}: takes one model; name one --adapter')
  return next(iter(each.values()))
