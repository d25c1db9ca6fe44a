"""A beginning-of-sequence token precedes plain text as in transformers: in examples, prompts, requests and exports."""

import json

import pytest
import tiny
import transformers

from jaxpost.data import chat, preferences, prompts
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.environments import openai_format
from jaxpost.stage import reward_models
from jaxpost.tools import choices

BOS, END, TEXT = 256, 258, 'Once upon'
PLAIN = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}


def template(*pieces):
  """Returns a post-processor that puts the `pieces` around a text: A is the text, others are special tokens."""
  single = [{'Sequence' if p == 'A' else 'SpecialToken': {'id': p, 'type_id': 0}} for p in pieces]
  special = {p: {'id': p, 'ids': [BOS if p == '<|endoftext|>' else END], 'tokens': [p]} for p in pieces if p != 'A'}
  return {
    'type': 'TemplateProcessing',
    'single': single,
    'pair': [*single, {'Sequence': {'id': 'B', 'type_id': 1}}],
    'special_tokens': special,
  }


# Name: the post-processor of tokenizer.json, fields of tokenizer_config.json, and whether a text begins with BOS (None:
# that depends on the release of transformers, as only some read these fields where there is a tokenizer.json).
KINDS = {
  'gpt2': (PLAIN, {}, False),
  'none': (None, {}, False),
  'pythia': (template('A'), {}, False),
  'switched_off': (template('<|endoftext|>', 'A'), {'add_bos_token': False}, None),
  'switched_on': (PLAIN, {'add_bos_token': True}, None),
  'llama3': ({'type': 'Sequence', 'processors': [PLAIN, template('<|endoftext|>', 'A')]}, {}, True),
  'with_end': (template('<|endoftext|>', 'A', '<|im_end|>'), {}, True),
  'only_end': (template('A', '<|im_end|>'), {}, False),
}


@pytest.fixture(scope='module', params=KINDS)
def kind(request, tmp_path_factory):
  """Returns (folder of a tokenizer with a `bos_token` and no chat template, ids with which a text begins)."""
  processor, config, has_bos = KINDS[request.param]
  folder = tmp_path_factory.mktemp(request.param)
  tokenizer_lib.load('bytes').save(folder)
  (folder / 'chat_template.jinja').unlink()
  for name, fields in (
    ('tokenizer.json', {'post_processor': processor}),
    ('tokenizer_config.json', {'bos_token': '<|endoftext|>', **config}),
  ):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  if has_bos is None:
    has_bos = transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids[0] == BOS
  return folder, [BOS] * has_bos


def test_plain_text_begins_as_in_transformers(kind, tmp_path):
  folder, begin = kind
  tokenizer = tokenizer_lib.load(folder)
  assert tokenizer.bos_id == BOS and tokenizer.bos_ids == begin
  tokenizer.save(tmp_path)
  for path in (folder, tmp_path):  # readers of an export see the same prompts as training did
    theirs = transformers.AutoTokenizer.from_pretrained(path)(TEXT).input_ids
    assert [*tokenizer.bos_ids, *tokenizer.encode(TEXT)] == theirs[: len(theirs) - theirs.count(END)]


def test_examples_prompts_and_requests_begin_with_the_same_bos(kind):
  folder, begin = kind
  tokenizer = tokenizer_lib.load(folder)
  prompt = [*begin, *TEXT.encode()]
  prompt_and_completion = [*prompt, *b' a time', END]
  pair = {'prompt': TEXT, 'completion': ' a time'}
  assert chat.make_example(tokenizer, {'text': f'{TEXT} a time'}, 'x').tokens.tolist() == prompt_and_completion
  assert chat.make_example(tokenizer, pair, 'x').tokens.tolist() == prompt_and_completion
  assert prompts.prompt_tokens(tokenizer, pair, 'x').tolist() == prompt
  pair_example = preferences.make_pair_example(tokenizer, {'prompt': TEXT, 'chosen': ' a', 'rejected': ' b'}, 'x')
  assert pair_example.tokens[: len(prompt)].tolist() == prompt
  scored_example = preferences.make_scored_example(tokenizer, pair | {'score': 1.0}, 'x')
  assert scored_example.tokens.tolist() == prompt_and_completion
  steps_example = preferences.make_steps_example(tokenizer, {'prompt': TEXT, 'completions': ['a'], 'labels': [1]}, 'x')
  assert steps_example.tokens[: len(prompt)].tolist() == prompt
  (request_ids,) = openai_format.Translator(tokenizer, room=64).text_prompts({'prompt': TEXT})
  assert request_ids.tolist() == prompt
  question = choices.Question(TEXT, ('a',), 0)
  assert next(choices._examples(question, tokenizer)).tokens.tolist() == [*prompt, *b' a']


def test_bos_of_a_saved_tokenizer_is_read(tmp_path, shared_data):
  assert tokenizer_lib.load(shared_data('stories260K/hf')).bos_ids == []
  assert tokenizer_lib.load(tiny.after_bos(shared_data('stories260K/hf'), tmp_path / 'model')).bos_ids == [1]


def test_chat_begins_as_its_template_without_an_extra_bos(kind):
  tokenizer = tokenizer_lib.load(kind[0], 'chatml')
  messages = [{'role': 'user', 'content': 'Hi'}]
  ids = prompts.prompt_tokens(tokenizer, {'prompt': messages}, 'x').tolist()
  theirs = transformers.AutoTokenizer.from_pretrained(kind[0])
  theirs.chat_template = tokenizer.chat_template
  assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)['input_ids']
  assert next(choices._examples(choices.Question('Hi', ('a',), 0), tokenizer)).tokens.tolist() == [*ids, *b'a']


def test_reward_model_pad_id_is_the_bos_id(kind):
  assert reward_models.pad_id(tokenizer_lib.load(kind[0])) == BOS
