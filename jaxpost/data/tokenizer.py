"""Tokenizers: the only module that imports transformers and tokenizers.

`Tokenizer` is a thin record around a fast tokenizer, without torch. It behaves as tokenizer.json says: the class that
`transformers` has for a model family is never used, as it may behave differently. `load('bytes')` needs no file.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpost.data import messages as messages_lib
from jaxpost.errors import InputError, did_you_mean
from jaxpost.storage import object_store, seals

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerFast

_warn_once = functools.cache(logging.warning)
# Without it, the import of transformers recommends to install torch, which this library does not need.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# The template of the tokenizer 'bytes'. It renders chats as data/templates/chatml.jinja does, which refuses tools and
# their calls; this one leaves them out, so that environments with tools run with a model of `presets`.
CHATML = (
  "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
  "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_MARK = re.compile(r'\{%[-+]?\s*generation\b')  # marks the text of a template that the assistant generates
# Exceptions that expressions of a template raise.
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
_SWITCHES = {'enable_thinking': False}  # default template_kwargs
# Tokens that end a turn: sampling stops at those that the chat template writes.
_TURN_ENDS = ('<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<end_of_turn>', '<|end|>', '<|eot|>', '<turn|>')
_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'vocab.json',
  'merges.txt',
  'tokenizer.model',
  'vocab.txt',
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text <-> token ids, and chats -> text.

  Example: `load('bytes').encode('Hi<|im_end|>')` is [72, 105, 258].
  """

  hf: Any  # the transformers fast tokenizer
  source: str  # the folder it was read from, or 'bytes'
  eos_id: int  # ends a document
  pad_id: int
  bos_id: int | None  # of the `bos_token`, for exports; `bos_ids` are the ids that encoded text begins with
  vocab_size: int  # with the added tokens
  stop_ids: tuple[int, ...]  # sampling stops at any of them
  chat_template: str | None
  named_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)  # if there are several, such as tool_use
  # Variables of the chat template besides messages and tools; thinking is off unless it is switched on here.
  template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer with these values for variables of its chat template, which override its own."""
    return dataclasses.replace(self, template_kwargs={**self.template_kwargs, **kwargs})

  def encode(self, text: str) -> list[int]:
    """Returns the token ids of `text`; no tokens are added, special tokens are parsed."""
    return self.encode_all([text])[0]

  def encode_all(self, texts: list[str]) -> list[list[int]]:
    """Returns the token ids of each text, see `encode`; runs in parallel and releases the GIL, as servers need."""
    # `self.hf.encode` sets options on the shared tokenizer, which fails if two threads encode at the same time.
    encodings = self.hf.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Returns the text of token ids, with or without special tokens."""
    ids = [int(i) for i in ids]
    return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

  def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the token ids of `text`, and the (start, end) of the characters of each token."""
    encoding = self.hf.backend_tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets

  @functools.cached_property
  def bos_ids(self) -> list[int]:
    """The ids that the tokenizer puts before a text: usually `bos_id` or none.

    Not all tokenizers with a `bos_token` do: Llama's and Gemma's put it before each text, GPT-2's and Pythia's never.
    """
    encoding = self.hf.backend_tokenizer.encode('a')
    return encoding.ids[: [*encoding.special_tokens_mask, 0].index(0)]

  @functools.cached_property
  def special_texts(self) -> tuple[str, ...]:
    """The texts of the added tokens, longest first."""
    texts = [t.content for t in self.hf.added_tokens_decoder.values()]
    return tuple(sorted(texts, key=lambda t: (-len(t), t)))

  @functools.cached_property
  def longest_token(self) -> int:
    """The number of characters of the longest token."""
    return max(map(len, self.hf.get_vocab()))

  @functools.cached_property
  def adds_space(self) -> bool:
    """True if encoding puts a space before the text, as SentencePiece models do."""
    return self.decode(self.encode('a') + self.encode('a')) != 'aa'

  def render_chat(
    self,
    messages: list[dict],
    *,
    generation_prompt: bool = False,
    row: Mapping[str, Any] | None = None,
    where: str = 'chat',
  ) -> tuple[str, list[tuple[int, int]] | None]:
    """Returns a chat as text, and the (start, end) spans of its {% generation %} markers, or None without markers.

    Args:
      messages: list of {'role', 'content', ...}.
      generation_prompt: whether to append the header of an assistant turn.
      row: may have `tools` (JSON schemas), and `chat_template_kwargs`, which override the tokenizer's.
      where: names the chat in errors.
    """
    import jinja2
    from transformers.utils import chat_template_utils

    from jaxpost.data import template_limits

    template_limits.install(chat_template_utils)
    template_limits.begin()
    tools = messages_lib.tools_of(row or {}, where)
    template = self.named_templates.get('tool_use', self.chat_template) if tools else self.chat_template
    if not template:
      raise InputError(
        f'{where}: messages need a chat template and {self.source} has none; use an instruct tokenizer, give '
        '--chat_template where --model or --run names the weights, or else set '
        f'config.data.chat_template to a .jinja file or one of {", ".join(sorted(_named_templates()))}'
      )
    if tools and not _reads(template, 'tools'):
      _warn_once(
        'the chat template of %s does not read `tools`, so the model is not shown its tools, unless the prompts list '
        'them (config.data.system_prompt): set config.data.chat_template to a .jinja file that lists them',
        self.source,
      )
    # A fixed date, as templates that print today's date would change the run each day.
    variables = {**_SWITCHES, 'date_string': '26 Jul 2024', **self.hf.special_tokens_map, **self.template_kwargs}
    variables |= messages_lib.template_kwargs_of(row or {}, where)
    has_marks = _MARK.search(template) is not None
    try:
      rendered: Any = chat_template_utils.render_jinja_template(  # its annotation, str, is wrong
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=has_marks,
        add_generation_prompt=generation_prompt,
        **variables,
      )
    except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
      message = error if isinstance(error, jinja2.TemplateError) else f'{type(error).__name__}: {error}'
      message = ' '.join(str(message).split())  # on one line
      raise InputError(f'{where}: the chat template of {self.source} refuses it: {message:.300}') from error
    texts, spans = rendered
    return messages_lib.check_text(texts[0], where), list(spans[0]) if has_marks else None

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes the files that `transformers.AutoTokenizer` loads.

    tokenizer_config.json gets the variables of the chat template as `chat_template_kwargs`, which `load` reads.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    added: dict[str, Any] = {}  # to tokenizer_config.json
    if self.source == 'bytes':
      self.hf.save_pretrained(folder)
      added['tokenizer_class'] = 'PreTrainedTokenizerFast'  # a class that every release of transformers has
    else:  # copied, not rewritten: transformers would change the class name
      for path in (pathlib.Path(self.source) / name for name in _FILES):
        if path.is_file():
          shutil.copyfile(path, folder / path.name)
    if self.named_templates:  # a file would override them
      (folder / 'chat_template.jinja').unlink(missing_ok=True)
      added['chat_template'] = [dict(name=name, template=text) for name, text in self.named_templates.items()]
    elif self.chat_template:
      (folder / 'chat_template.jinja').write_text(self.chat_template, encoding='utf-8')
    templates = ''.join([self.chat_template or '', *self.named_templates.values()])
    if used := {k: v for k, v in {**_SWITCHES, **self.template_kwargs}.items() if _reads(templates, k)}:
      added['chat_template_kwargs'] = used
    if added:
      path = folder / 'tokenizer_config.json'
      config = object_store.read_json(path) if path.is_file() else {}
      object_store.write_json(path, config | added)


def load(
  path: str | pathlib.Path, chat_template: str = '', template_kwargs: Mapping[str, Any] | None = None
) -> Tokenizer:
  """Loads the tokenizer of a Hugging Face folder or hub name, or 'bytes'.

  Args:
    path: a folder with tokenizer.json, 'org/name', or 'bytes': a token for each byte, and <|endoftext|> 256,
      <|im_start|> 257, <|im_end|> 258.
    chat_template: replaces the tokenizer's own template: a name in data/templates, a .jinja file, or its text.
    template_kwargs: passed to the chat template wherever this tokenizer renders a chat: prompts, training rows and
      turns of an environment. They override `chat_template_kwargs` of tokenizer_config.json, which `save` writes.
  """
  if path == 'bytes':
    hf, source, config = _bytes(), 'bytes', {}
  else:
    folder = _folder(path)
    seals.warn(folder, _FILES)
    hf, source = _from_folder(folder), str(folder.absolute())
    config = _read_config(folder)
  # The file may set a length for truncation or padding.
  hf.backend_tokenizer.no_truncation()
  hf.backend_tokenizer.no_padding()
  template = hf.chat_template
  named: dict[str, str] = {}
  if chat_template:
    template = _template(str(chat_template))
  elif isinstance(template, dict):
    template, named = template.get('default'), template
  templates = ''.join([template or '', *named.values()])
  saved = messages_lib.template_kwargs_of(hf.init_kwargs, f'{source}/tokenizer_config.json')
  kwargs = messages_lib.template_kwargs_of({'chat_template_kwargs': template_kwargs}, 'config.data.template_kwargs')
  for name in kwargs:
    if not _reads(templates, name):
      raise InputError(f'config.data.template_kwargs.{name}: the chat template of {path} reads no such variable')
  configured = config.get('eos_token_id')
  configured = configured if isinstance(configured, list) else [configured]
  candidates = (hf.eos_token_id, *configured[:1], hf.get_vocab().get('<|endoftext|>'))
  eos = next((i for i in candidates if i is not None), None)
  if eos is None:
    raise InputError(f'{path}: the tokenizer has no end-of-text token; set "eos_token" in its tokenizer_config.json')
  # In gpt-oss, <|return|> ends a turn, and <|end|> only its reasoning.
  ends_reasoning = '<|end|>' if '<|return|>' in templates else ''
  turn_ends = [hf.get_vocab().get(text) for text in _TURN_ENDS if text in templates and text != ends_reasoning]
  return Tokenizer(
    hf=hf,
    source=source,
    eos_id=eos,
    pad_id=eos if hf.pad_token_id is None else hf.pad_token_id,
    bos_id=hf.bos_token_id,
    vocab_size=len(hf),
    stop_ids=tuple(dict.fromkeys(i for i in (eos, *configured, *turn_ends) if i is not None)),
    chat_template=template or None,
    named_templates=named,
    template_kwargs=saved | kwargs,
  )


def _template(chosen: str) -> str:
  """Returns the text of a template, which is chosen as text, by name from data/templates, or as a file."""
  if '{{' in chosen or '{%' in chosen:
    return chosen
  named = _named_templates()
  file = named.get(chosen) or pathlib.Path(chosen).expanduser()
  if not file.is_file():
    raise InputError(
      f'config.data.chat_template: no file {chosen}, and no template of that name; {did_you_mean(chosen, named)}'
      f'known: {", ".join(sorted(named))}'
    )
  return file.read_text(encoding='utf-8-sig')


def _named_templates() -> dict[str, pathlib.Path]:
  return {file.stem: file for file in pathlib.Path(__file__).with_name('templates').glob('*.jinja')}


def _reads(templates: str, name: str) -> bool:
  return re.search(rf'\b{re.escape(name)}\b', templates) is not None


def _folder(path: str | pathlib.Path) -> pathlib.Path:
  if object_store.is_remote(path):
    from jaxpost.storage import remote

    object_store.check(str(path), 'config.model.tokenizer')
    return remote.here(str(path), (*_FILES, 'generation_config.json', 'config.json'))
  folder = pathlib.Path(path).expanduser()
  if folder.is_dir():
    return folder
  if folder.exists():
    raise InputError(f'{path}: a tokenizer is a folder, this is a file')

  from jaxpost.storage import hub

  on_hub = hub.parse(str(path))
  if on_hub is None:
    raise InputError(f"{path}: no such folder; config.model.tokenizer is a Hugging Face folder, 'org/name' or 'bytes'")
  repo, revision, file = on_hub
  if file:
    raise InputError(f'{path}: name the repository of a tokenizer, not a file')
  return hub.download(repo, 'model', revision)


def _from_folder(folder: pathlib.Path) -> PreTrainedTokenizerFast:
  import transformers

  files = [n for n in _FILES if (folder / n).is_file()]
  if 'tokenizer.json' in files:
    # Not AutoTokenizer, which imports torch if it is installed.
    cls: Any = transformers.PreTrainedTokenizerFast
  elif {'vocab.json', 'tokenizer.model', 'vocab.txt'} & set(files):
    cls = transformers.AutoTokenizer
  else:
    names = ', '.join(sorted(p.name for p in folder.iterdir())[:8])
    raise InputError(f'{folder}: no tokenizer here (tokenizer.json); the folder has {names or "nothing"}')
  for name in files:
    if name.endswith('.json'):
      content = object_store.read_json(folder / name)
      if name == 'tokenizer.json' and 'model' not in content:
        raise InputError(f'{folder / name}: has no "model": not a tokenizer')
  try:
    hf = cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
  except BaseException as error:
    # The library `tokenizers` raises a bare Exception for a file that it cannot read.
    if type(error) is not Exception and not isinstance(error, (ValueError, TypeError, KeyError, ImportError, OSError)):
      raise
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if 'custom code' in message:
      message = 'it needs code of its own, which is never run; save it with a tokenizer.json'
    raise InputError(f'{folder}: unreadable tokenizer: {message}') from error
  if not hf.is_fast:
    raise InputError(f'{folder}: only fast tokenizers are supported; save one with a tokenizer.json')
  return hf


def _read_config(folder: pathlib.Path) -> dict:
  """Returns generation_config.json, or else config.json, if it has `eos_token_id`."""
  for name in ('generation_config.json', 'config.json'):
    if (folder / name).is_file():
      config = object_store.read_json(folder / name)
      if config.get('eos_token_id') is not None:
        return config
  return {}


@functools.cache
def byte_of_letter() -> dict[str, int]:
  """Returns {printable character: byte that it stands for} of byte-level tokenizers (GPT-2)."""
  from transformers.convert_slow_tokenizer import bytes_to_unicode

  return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _bytes() -> PreTrainedTokenizerFast:
  """Returns a tokenizer in which id i < 256 is byte i, with a ChatML template."""
  import tokenizers
  import transformers
  from tokenizers import decoders, models, pre_tokenizers

  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=byte_of_letter(), merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(['<|endoftext|>', '<|im_start|>', '<|im_end|>'])
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token='<|im_end|>', pad_token='<|endoftext|>', clean_up_tokenization_spaces=False
  )
  hf.chat_template = CHATML
  return hf
