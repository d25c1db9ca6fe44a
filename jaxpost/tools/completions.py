"""Prompts in, completions out: lists, files that can be continued, chats.

Legend: N prompts, n samples a prompt, P prompt tokens.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib

import jax
import numpy as np
import rich.console
import rich.text
from rich import progress

from jaxpost.data import chat, sources
from jaxpost.distributed.mesh import make_layout
from jaxpost.errors import InputError
from jaxpost.matmul import compute_for
from jaxpost.models import attention_kernels
from jaxpost.programs.compile import Ledger
from jaxpost.rl import batching
from jaxpost.rollout.native import NativeEngine, SamplerConfig
from jaxpost.rollout.sampler_config import rung
from jaxpost.stage import assemble
from jaxpost.storage import array_cache, object_store
from jaxpost.tools.inference import Weights, adapters, merged, to_stderr
from jaxpost.types import Completion, Prompt, Request, Rollout

_TOGETHER = 256  # sequences of a file between two writes
_CONTEXT = 4096  # tokens of a chat at most


def make_prompts(weights: Weights, texts=(), file='', as_chat=None):
  """`Prompt`s of the rows of `file`, then of `texts`.

  Args:
    file: any data with the column prompt, messages, prompt_ids or text.
    as_chat: texts are what a user says (None: if the tokenizer has a
      template); else the model goes on with them.
  """
  read = [sources.read(file)] if file else []
  if texts:
    read.append(sources.read('--prompt', fake_rows=[{'prompt': text} for text in texts]))
  return prompts_of(weights, read, as_chat)


def prompts_of(weights: Weights, sources_, as_chat=None) -> list[Prompt]:
  """`Prompt`s of the rows of several `sources.Rows`; see `make_prompts`."""
  tokenizer, data = weights.prepared.tokenizer, weights.prepared.config.data
  as_chat = bool(tokenizer.chat_template) if as_chat is None else as_chat
  prompts = []
  for row, where in [(r[i], r.where(i)) for r in sources_ for i in range(len(r))]:
    given = row
    if 'text' in row and not {'prompt', 'messages'} & set(row):
      row = {'prompt': row['text']}  # a line of a .txt file
    text = row.get('prompt')
    if as_chat and isinstance(text, str):
      row = {**row, 'prompt': [{'role': 'user', 'content': text}]}
    if row.get('prompt_ids') is not None:
      tokens = check_ids(row['prompt_ids'], tokenizer, where)
      prompt = tokenizer.decode(tokens, skip_special=False)
    else:
      plain = isinstance(row.get('prompt'), str)
      prompt = chat.prompt_of(row, where, '' if plain else data.system_prompt)
      tokens = chat.encode_prompt(tokenizer, prompt, row, where)
    prompts.append(Prompt(len(prompts), tokens, prompt, given))
  return prompts


def check_ids(ids, tokenizer, where) -> np.ndarray:
  """[P] int32 of a row's `prompt_ids`."""
  size = tokenizer.vocab_size
  if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < size for i in ids):
    raise InputError(f'{where}: prompt_ids: must be a list of token ids below {size}')
  return np.asarray(ids, np.int32)


@dataclasses.dataclass(frozen=True)
class Draws:
  """What decides completions besides weights and prompts.

  temperature: 0 is greedy. top_k, top_p: 0 and 1 are off. top_logprobs: of so
  many of the likeliest tokens at each place.
  """

  n: int = 1
  seed: int = 0
  max_new_tokens: int = 128
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  top_logprobs: int = 0


def complete(weights: Weights, prompts, draws=Draws(), mesh='data=-1') -> Rollout:
  """n completions of each prompt."""
  return _draw(_engine_for(weights, prompts, draws, mesh), prompts, draws)


def _engine_for(weights, prompts, draws, mesh) -> NativeEngine:
  return make_engine(
    weights,
    slots=min(len(prompts) * draws.n, 64),
    max_prompt=max(len(x.tokens) for x in prompts),
    max_new_tokens=draws.max_new_tokens,
    mesh=mesh,
    top_logprobs=draws.top_logprobs,
  )


def _draw(engine, prompts, draws) -> Rollout:
  return engine(prompts, group_size=draws.n, run_key=assemble.run_key(draws.seed, 3), step=0, sampling=_sampling(draws))


def _sampling(draws: Draws) -> dict:
  return dict(temperature=draws.temperature, top_k=draws.top_k, top_p=draws.top_p, top_logprobs=draws.top_logprobs)


def make_engine(
  weights: Weights, *, slots, max_prompt, max_new_tokens, mesh='data=-1', top_logprobs=0, share=False
) -> NativeEngine:
  """A sampler that holds these weights.

  share: it samples from these very leaves, slower, where no copy is wanted.
  """
  p, model = weights.prepared, weights.prepared.model
  if model.head is None:
    raise InputError(f'{p.name}: is a reward model, which writes no text')
  if share:  # nothing is trained here
    model = dataclasses.replace(model, frozen=frozenset(model.table))
  platform = jax.default_backend()
  compute = compute_for(platform, p.config.model.dtype, 'none')
  if attention_kernels.uses_kernel(compute):
    from jaxpost.hardware import kernel_check

    room = max_prompt + max_new_tokens
    compute = kernel_check.settle(compute, [(model.config, rung(n, room), 1) for n in range(1, room + 1)])
  engine = NativeEngine(
    model,
    SamplerConfig(
      slots=slots,
      max_prompt=max_prompt,
      max_new_tokens=max_new_tokens,
      stop_ids=p.tokenizer.stop_ids,
      top_logprobs=top_logprobs,
    ),
    make_layout(mesh, 'rollout', '--mesh'),
    compute,
    Ledger(),
    functools.partial(p.tokenizer.decode, skip_special=False),
    share=share,
  )
  engine.load(weights.params, weights.step)
  return engine


def make_engines(
  weights: Weights, name: str, folders, *, slots, max_prompt, max_new_tokens, mesh='data=-1', top_logprobs=0
) -> dict:
  """{name: engine} of a model, and of `inference.adapters` of it.

  They share the base, with what it has of adapters or codes merged.
  """
  if folders:  # once, and as samplers have it
    weights, layout = merged(weights), make_layout(mesh, 'rollout', '--mesh')
    weights = dataclasses.replace(
      weights, layout=layout, params=jax.device_put(weights.params, weights.prepared.model.shardings(layout))
    )
  each = {k: w for k, w in adapters(weights, folders).items() if k}
  if name in each:
    raise InputError(f'--adapter: {name} is what the model below is called')
  return {
    k: make_engine(
      w,
      slots=slots,
      max_prompt=max_prompt,
      max_new_tokens=max_new_tokens,
      mesh=mesh,
      top_logprobs=top_logprobs,
      share=bool(each),
    )
    for k, w in ({name: weights} | each).items()
  }


def completion_rows(rollout: Rollout, tokenizer) -> list[dict]:
  """One JSON-able row a completion."""
  rows, size = [], len(rollout.lengths) // len(rollout.prompts)
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


def text_after(tokenizer, prompt_ids, ids) -> str:
  """The text of a completion where it stands.

  Alone, some tokenizers drop the space that it begins with.
  """
  before = tokenizer.decode(prompt_ids)
  whole = tokenizer.decode([*prompt_ids, *ids])
  return whole[len(before) :] if whole.startswith(before) else (tokenizer.decode(ids))


def finish(each: dict[str, Weights], prompts, draws, mesh, out, source, show):
  """Completes prompts into the file `out`, or row by row to `show`.

  By each of the `inference.adapters`, whose names are in their rows.
  """
  if out:
    left = complete_file(only(each, '--out'), prompts, out, draws, mesh, source)
    to_stderr(f'{out}: {len(prompts)} rows, {left} of them new')
    return
  for name, weights in each.items():
    rollout = complete(weights, prompts, draws, mesh)
    for row in completion_rows(rollout, weights.prepared.tokenizer):
      show(row | ({'adapter': name} if name else {}))
    cut = int((~rollout.finished).sum())
    if cut:
      to_stderr(f'{cut} of {len(rollout.lengths)} cut at --max_new_tokens')


def show(row: dict):
  """A row of `completion_rows` for people: what was asked, what came."""
  text = row['prompt']
  text = text if isinstance(text, str) else text[-1]['content'] + '\n'
  shown = rich.text.Text.assemble((row.get('adapter', ''), 'bold'), (text, 'dim'), (row['completion'], 'green'))
  rich.console.Console(highlight=False, soft_wrap=True).print(shown)


def show_json(row: dict):
  print(json.dumps(row))


def only(each: dict[str, Weights], flag: str) -> Weights:
  """The weights, where there are those of one adapter at most."""
  if len(each) > 1:
    raise InputError(f'{flag}: is for one model; name one --adapter')
  return next(iter(each.values()))


# --------------------------------------------------------------------- files


def complete_file(weights: Weights, prompts, out, draws=Draws(), mesh='data=-1', source='') -> int:
  """Writes {**row, completions, completion_ids, logprobs} for each prompt.

  What `out` holds already stays, if it is of the same prompts and draws: the
  same call goes on where another was killed, and the file is that of a call
  that was not. `OUT.of.json` beside it says what it is of.

  Args:
    source: the weights, by name.

  Returns:
    How many prompts were left to do.
  """
  together = max(1, _TOGETHER // draws.n)
  done = _begin(
    out,
    dict(
      weights=[source, weights.step],
      draws=dataclasses.asdict(draws),
      prompts=array_cache.fingerprint([p.tokens.tolist() for p in prompts]),
    ),
    together,
    len(prompts),
  )
  if done == len(prompts):
    return 0
  engine = _engine_for(weights, prompts, draws, mesh)
  tokenizer = weights.prepared.tokenizer
  bar = progress.Progress(
    *progress.Progress.get_default_columns(), progress.MofNCompleteColumn(), console=rich.console.Console(stderr=True)
  )
  with open(out, 'a', encoding='utf-8') as file, bar:
    task = bar.add_task('prompts', total=len(prompts), completed=done)
    for start in range(done, len(prompts), together):
      part = prompts[start : start + together]
      rows = _rows_of(_draw(engine, part, draws), tokenizer)
      file.write(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))
      file.flush()
      bar.advance(task, len(part))
  return len(prompts) - done


def _rows_of(rollout: Rollout, tokenizer) -> list[dict]:
  """One row a prompt: its own columns, and the completions."""
  size = len(rollout.lengths) // len(rollout.prompts)
  rows = []
  for i, prompt in enumerate(rollout.prompts):
    members = range(i * size, (i + 1) * size)
    ids = [rollout.completions[n, : rollout.lengths[n]].tolist() for n in members]
    rows.append(
      {
        **prompt.columns,
        'completions': [text_after(tokenizer, prompt.tokens, x) for x in ids],
        'completion_ids': ids,
        'logprobs': [[round(float(x), 6) for x in rollout.logprobs[n, : rollout.lengths[n]]] for n in members],
      }
    )
    if rollout.top_ids is not None:
      rows[-1]['top_logprobs'] = [batching.top_logprobs(rollout, n)['top_logprobs'] for n in members]
  return rows


def _begin(out, about: dict, together: int, total: int) -> int:
  """How many rows of the file stay; the rest of it is cut off.

  Whole batches stay, as the number of sequences sampled together decides the
  last bits of their log-probs.
  """
  beside, about = pathlib.Path(f'{out}.of.json'), json.loads(json.dumps(about))
  out = pathlib.Path(out)
  if not out.exists():
    out.parent.mkdir(parents=True, exist_ok=True)
    object_store.write_text(beside, json.dumps(about))
    out.touch()
    return 0
  was = json.loads(beside.read_text()) if beside.exists() else {}
  for key, value in about.items():
    if was.get(key) != value:
      raise InputError(
        f'{out}: is there and of other {key} ({was.get(key, "unknown")}, now {value}); name another file, or remove it'
      )
  lines = out.read_bytes().splitlines(keepends=True)
  whole = sum(line.endswith(b'\n') for line in lines)
  kept = whole if whole == total else whole // together * together
  os.truncate(out, sum(map(len, lines[:kept])))
  return kept


# --------------------------------------------------------------------- chats


def chat_loop(weights: Weights, draws, mesh, first, asked, out):
  """Answers what is said, line by line, until the end of `asked`.

  Args:
    first: what is said first, if anything.
    asked: lines, such as sys.stdin; `out` gets the answers as they come.
  """
  tokenizer, messages = weights.prepared.tokenizer, []
  system = weights.prepared.config.data.system_prompt
  if system:
    messages.append({'role': 'system', 'content': system})
  # A template that cannot render a chat is told of before a model is loaded.
  chat.encode_prompt(tokenizer, [{'role': 'user', 'content': ''}], {}, '--chat')
  engine = make_engine(
    weights,
    slots=1,
    max_prompt=_CONTEXT,
    max_new_tokens=draws.max_new_tokens,
    mesh=mesh,
    top_logprobs=draws.top_logprobs,
  )
  for turn, text in enumerate(itertools.chain(first, _lines(asked, out))):
    messages.append({'role': 'user', 'content': text})
    ids = chat.encode_prompt(tokenizer, messages, {}, '--chat')
    if len(ids) > _CONTEXT:
      raise InputError(f'--chat: {len(ids)} tokens are more than the {_CONTEXT} that a chat may have; begin a new one')
    messages.append(
      {'role': 'assistant', 'content': _answer(engine, tokenizer, Prompt(turn, ids, messages, {}), draws, out)}
    )


def _answer(engine, tokenizer, prompt, draws, out) -> str:
  """Writes an answer as it comes."""
  shown = 0

  def tell(tokens):
    nonlocal shown
    text = tokenizer.decode(tokens)
    # Half a character is a mark of its own until the rest comes.
    if not text.endswith('\ufffd'):
      out.write(text[shown:])
      out.flush()
      shown = max(shown, len(text))

  text = tokenizer.decode(stream(engine, prompt, draws, tell).tokens)
  out.write(text[shown:] + '\n')
  return text


def _lines(asked, out):
  while True:
    out.write('> ')
    out.flush()
    line = asked.readline()
    if not line:
      out.write('\n')
      return
    if line.strip():
      yield line.rstrip('\n')


def stream(engine: NativeEngine, prompt: Prompt, draws: Draws, tell) -> Completion:
  """One completion; `tell(ids so far)` hears of each block of it."""
  done = []

  def follow(completions, idle):
    del idle
    done.extend(completions)
    return ()

  engine.serve(
    [Request(prompt.tokens, prompt.index, 0, {**_sampling(draws), 'max_tokens': draws.max_new_tokens})],
    run_key=assemble.run_key(draws.seed, 3),
    step=0,
    follow=follow,
    tell=lambda request, ids: tell(ids.tolist()),
  )
  return done[0]
