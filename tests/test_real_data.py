"""Training and reading of real weights and data: stories260K, GSM8K, Shakespeare, preferences, Qwen3's tokenizer.

Skipped where the data is not there (see `shared_data`). The expectations are known from elsewhere: the losses that
transformers computes for these weights, and the sizes and contents of the data sets.
"""

import json
import shutil

import numpy as np
import pytest
import rich.console
import tiny

from configs import grpo_gsm8k, sft_gsm8k
from jaxpost import stages
from jaxpost.data import chat, loader, preferences, sources
from jaxpost.data import tokenizer as tokenizer_lib
from jaxpost.errors import InputError
from jaxpost.rewards import math
from jaxpost.stage import evaluate, prepare

REWARD = '''
def letters(completions, **columns):
  """The share of the letter e."""
  return [c.count('e') / max(len(c), 1) for c in completions]
'''


def train(config, workdir):
  """Runs the config; {split: rows of metrics.jsonl}."""
  stages.run(config, workdir, rich.console.Console(quiet=True))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return {s: [r for r in rows if r['split'] == s] for s in ('train', 'eval')}


def stories_config(shared_data, **over):
  folder = str(shared_data('stories260K/hf'))
  return tiny.merged(tiny.run_config(folder), tiny.merged(dict(model=dict(tokenizer='')), over))


def stories(shared_data):
  """The documents of the sample but the first and the last, which are cut off."""
  file = shared_data('text/tinystories_sample_2MiB.txt')
  return [d.strip() for d in file.read_text().split('<|endoftext|>')][1:-1]


def text_file(path, documents):
  path.write_text('\n<|endoftext|>\n'.join(documents))
  return dict(path=str(path))


# ----------------------------------------------------- stories260K, real loss


def sft_config(shared_data, path, train_on, held_out, **over):
  return stories_config(
    shared_data,
    **tiny.merged(
      dict(
        data=text_file(path / 'train.txt', train_on),
        train=dict(batch_size=4, row_length=256),
        eval=dict(size=64, data=text_file(path / 'held_out.txt', held_out)),
      ),
      over,
    ),
  )


def test_held_out_loss_of_stories260k_equals_transformers(shared_data, tmp_path):
  documents = stories(shared_data)
  held_out = documents[-64:]
  folder = tiny.after_bos(shared_data('stories260K/hf'), tmp_path / 'model')  # the model was trained with BOS
  config = sft_config(
    shared_data,
    tmp_path,
    documents[:64],
    held_out,
    model=dict(tokenizer=folder),
    train=dict(steps=1),
    optim=dict(lr=0.0),
  )
  before, after = train(config, tmp_path / 'run')['eval']
  assert before['loss'] == pytest.approx(after['loss'], abs=1e-6)
  assert 1.1 < before['loss'] < 1.5
  # The loss of transformers in float32 on the same tokens, which are those of the text and EOS.
  assert before['loss'] == pytest.approx(torch_loss(folder, held_out), abs=2e-5)


def torch_loss(folder, documents):
  torch = pytest.importorskip('torch')
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  total = count = 0.0
  for document in documents:
    ids = torch.tensor([[*tokenizer(document)['input_ids'], 2][:256]])  # EOS; truncated to a row
    assert ids[0, 0] == 1
    with torch.no_grad():
      total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
    count += ids.shape[1] - 1
  return total / count


def test_sft_lowers_the_held_out_loss(shared_data, tmp_path):
  # The model was trained on stories, but not on Shakespeare.
  file = shared_data('text/tinyshakespeare.txt')
  speeches = file.read_text().split('\n\n')
  config = sft_config(
    shared_data, tmp_path, speeches[:800], speeches[-64:], train=dict(steps=20), optim=dict(lr=2e-3, schedule='cosine')
  )
  rows = train(config, tmp_path / 'run')
  losses = [r['loss'] for r in rows['eval']]
  assert losses[1] < losses[0] - 1.0
  assert all(r['skipped_updates'] == 0 for r in rows['train'])


# --------------------------------------------- stories260K, a reward of yours


def test_grpo_raises_reward_of_a_function_in_a_file(shared_data, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'rewards.py').write_text(REWARD)
  prompts = [' '.join(d.split()[:4]) for d in stories(shared_data)[:64]]
  (tmp_path / 'prompts.jsonl').write_text(''.join(json.dumps(dict(prompt=p)) + '\n' for p in prompts))
  config = stories_config(
    shared_data,
    algorithm='grpo',
    reward='./rewards.py:letters',
    data=dict(path='prompts.jsonl'),
    train=dict(steps=15, row_length=0),
    optim=dict(lr=1e-3),
    rollout=dict(prompts=4, group_size=8, max_prompt_length=16, max_new_tokens=16),
  )
  rows = train(config, tmp_path / 'run')['train']
  rewards = [r['reward'] for r in rows]
  assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
  # With real weights, too, the sampler has the log-probs of the trainer.
  assert rows[0]['sampler_mismatch'] == pytest.approx(1, abs=1e-5)
  last = tmp_path / 'run' / 'samples' / 'grpo' / '15.jsonl'
  samples = [json.loads(line) for line in last.read_text().splitlines()]
  assert len(samples) == 32 and {s['prompt'] for s in samples} <= set(prompts)
  shares = [s['completion'].count('e') / max(len(s['completion']), 1) for s in samples]
  assert np.mean(shares) == pytest.approx(rewards[-1], abs=1e-6)


# ------------------------------------------------------------ GSM8K and Qwen3


@pytest.fixture(scope='module')
def gsm8k(shared_data, tmp_path_factory):
  """A file of the first 48 problems in their original format."""
  lines = shared_data('gsm8k/train.jsonl').read_text().splitlines(True)
  path = tmp_path_factory.mktemp('gsm8k') / 'train.jsonl'
  path.write_text(''.join(lines[:48]))
  return str(path)


@pytest.fixture(scope='module')
def qwen(shared_data, tmp_path_factory):
  """A tiny model with Qwen3's tokenizer and size of vocabulary."""
  tokenizer = shared_data('tokenizers/qwen3')
  folder = tmp_path_factory.mktemp('qwen') / 'qwen3'
  tiny.folder(folder, vocab_size=151_936)
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(tokenizer / name, folder / name)
  return str(folder)


@pytest.mark.parametrize('recipe', [sft_gsm8k, grpo_gsm8k])
def test_recipes_train_on_gsm8k(recipe, gsm8k, qwen, tmp_path):
  config = recipe.get_config('runlocal')
  config.model.update(path=qwen, tokenizer='')
  config.data.path = gsm8k
  config.eval.data.path = ''
  config.train.update(steps=1, batch_size=2)
  config.rollout.update(prompts=2, group_size=2, max_prompt_length=128, max_new_tokens=4)
  config.reward = 'gsm8k'
  config.log.tensorboard = config.save.export = False
  (row,) = train(config, tmp_path)['train']
  # A random model predicts each of the 151,936 tokens with about the same probability.
  assert row['entropy'] == pytest.approx(np.log(151_936), rel=0.05)
  if recipe is sft_gsm8k:
    assert row['loss'] == pytest.approx(np.log(151_936), rel=0.1)
    return
  samples = (tmp_path / 'samples' / 'grpo' / '1.jsonl').read_text()
  first = json.loads(samples.splitlines()[0])
  questions = [json.loads(x)['question'] for x in open(gsm8k)]
  assert any(first['prompt'].startswith(q) for q in questions)
  assert '#### answer' in first['prompt'] and first['components']['gsm8k'] == 0


def test_a_vocabulary_too_small_is_refused(shared_data, gsm8k):
  config = sft_gsm8k.get_config('runlocal')
  config.data.path = gsm8k
  config.model.tokenizer = str(shared_data('tokenizers/qwen3'))
  with pytest.raises(InputError, match='151669 tokens .* 259 embedding rows') as caught:
    prepare.prepare_all(config.to_dict())
  assert '\n' not in str(caught.value)


def test_gsm8k_map_reads_every_problem_and_its_answers_are_right(shared_data):
  path = str(shared_data('gsm8k/train.jsonl'))
  rows = sources.read(path, map_fn='jaxpost.data.maps:gsm8k')
  assert len(rows) == 7473 and rows.dropped == 0
  raw = sources.read(path)
  for row, raw_row in zip(rows, raw):
    (user,), (assistant,) = row['prompt'], row['completion']
    assert (user['role'], assistant['role']) == ('user', 'assistant')
    assert user['content'].startswith(raw_row['question'].strip())
    assert '<<' not in assistant['content'] and row['answer'] == raw_row['answer']
  completions = [row['completion'] for row in rows]
  answers = [row['answer'] for row in rows]
  assert all(r == 1.0 for r in math.gsm8k(completions, answers))
  # Graded against the answer of another problem, few are right.
  assert np.mean(math.gsm8k(completions, answers[1:] + answers[:1])) < 0.1


def test_columns_are_renamed_before_the_map_on_gsm8k(gsm8k, tmp_path):
  plain = tiny.run_config(
    '', data=dict(path=gsm8k, columns='prompt=question,completion=answer'), train=dict(row_length=512)
  )
  plain['model'].update(preset='tiny')
  (stage,) = prepare.prepare_all(plain)
  assert stage.data.rows[0]['prompt'].startswith('Natalia sold clips')
  assert stage.data.rows[0]['completion'].endswith('#### 72')
  example = stage.inputs.algorithm.render(stage.data.rows, stage.inputs.tokenizer, stage.config)(0)
  trained = stage.inputs.tokenizer.decode(example.tokens[example.loss_mask])
  assert trained.startswith('Natalia sold 48/2') and '####' in trained

  # `columns` renames to the columns that the map reads, so it must come first.
  other = tmp_path / 'other.jsonl'
  rows = [json.loads(line) for line in open(gsm8k)]
  other.write_text(''.join(json.dumps(dict(problem=r['question'], solution=r['answer'])) + '\n' for r in rows))
  both = tiny.merged(
    plain, dict(data=dict(path=str(other), columns='question=problem,answer=solution', map='jaxpost.data.maps:gsm8k'))
  )
  (stage,) = prepare.prepare_all(both)
  assert stage.data.rows[0]['prompt'][0]['content'].startswith('Natalia')
  assert stage.data.rows[0]['answer'] == rows[0]['answer']

  without = tiny.merged(both, dict(data=dict(columns='')))
  with pytest.raises(InputError, match=r'other\.jsonl:1: map_fn raised'):
    prepare.prepare_all(without)
  wrong = tiny.merged(plain, dict(data=dict(columns='prompt=qestion')))
  with pytest.raises(InputError, match=r"train\.jsonl:1: .*mean 'question'"):
    prepare.prepare_all(wrong)


# ------------------------------------------------- preferences and SFT samples


@pytest.fixture(scope='module')
def qwen_tokenizer(shared_data):
  return tokenizer_lib.load(shared_data('tokenizers/qwen3'))


def rendered(tokenizer, rows, share_prompt=True):
  """The examples of all pairs of a source; asserts that each has both answers of its row."""
  examples = []
  for n in range(len(rows)):
    example = preferences.make_pair_example(tokenizer, rows[n], rows.where(n), share_prompt=share_prompt)
    chosen, rejected = (tokenizer.decode(example.tokens[example.sequence_ids == i]) for i in (1, 2))
    _, chosen_answer, rejected_answer = preferences.pair_of(rows[n], 'x')
    if isinstance(chosen_answer, str):
      assert (chosen, rejected) == (chosen_answer, rejected_answer)
    else:
      # Only turns of the assistant; a template may strip space at their ends.
      for text, messages in ((chosen, chosen_answer), (rejected, rejected_answer)):
        for m in messages:
          assert m['role'] != 'assistant' or m['content'].strip() in text
    assert example.sequence_ids.max() == 2
    examples.append(example)
  return examples


def test_hh_rlhf_pairs_split_at_last_turn_and_share_prompts(shared_data, qwen_tokenizer):
  path = str(shared_data('preference/hh_harmless_base_test.jsonl.gz'))
  raw = sources.read(path)
  assert len(raw) == 2312
  errors, shared = [], 0
  for n in range(len(raw)):
    try:
      prompt, chosen, rejected = preferences.pair_of(raw[n], raw.where(n))
    except InputError as error:
      errors.append(str(error))
      continue
    assert (prompt + chosen, prompt + rejected) == (raw[n]['chosen'], raw[n]['rejected'])
    # Both share all but their last turn; the dialogues of five pairs differ before that.
    shared += not ('\n\nAssistant:' in chosen or '\n\nAssistant:' in rejected)
  # Four rows have an empty answer.
  assert len(errors) == 4 and all(': is empty' in e for e in errors)
  assert errors[0].startswith(f'{path}:87: ')
  assert shared >= 2303 - 1
  mapped = sources.read(path, map_fn='jaxpost.data.maps:hh_rlhf')
  assert mapped.dropped == 4 and len(mapped) == 2308
  sharing = rendered(qwen_tokenizer, mapped[:400])
  apart = rendered(qwen_tokenizer, mapped[:400], share_prompt=False)
  saved = 1 - sum(len(e.tokens) for e in sharing) / sum(len(e.tokens) for e in apart)
  assert 0.2 < saved < 0.5
  texts = raw[:80]
  rendered(qwen_tokenizer, sources.read('raw', fake_rows=list(texts)))


def test_sharegpt_pairs_are_cut_to_the_row_length(shared_data, qwen_tokenizer):
  rows = sources.read(str(shared_data('preference/dpo_en_demo.json')))
  assert len(rows) == 300
  examples = rendered(qwen_tokenizer, rows)
  length = 1024
  cut = [e.cut(length) for e in examples]
  for whole, part in zip(examples, cut):
    # `cut` returns None only if the prompt leaves no room for a token of each answer.
    fixed = int((whole.sequence_ids == 0).sum())
    assert (part is None) == (fixed + 2 > length)
    assert part is None or len(part.tokens) == min(len(whole.tokens), length)
    assert part is None or (part.sequence_ids == 0).sum() == fixed
  assert 0 < sum(c is None for c in cut) < 60
  batches = evaluate.eval_batches(examples, 8, length, per='pair')
  pairs = sum(int(b.sequence_ids.max(axis=1).sum()) for b in batches)
  assert pairs == 2 * sum(c is not None for c in cut)


def test_kto_rows_have_own_and_mismatched_answer(shared_data, qwen_tokenizer):
  rows = sources.read(str(shared_data('preference/kto_en_demo.json')))
  assert len(rows) == 300
  labels = []
  for n in range(len(rows)):
    other = preferences.mismatched(rows, n)
    example = preferences.make_unpaired_example(qwen_tokenizer, rows[n], rows[other], rows.where(n))
    own, kl = (qwen_tokenizer.decode(example.tokens[example.sequence_ids == i]).strip() for i in (1, 2))
    assert rows[n]['messages'][-1]['content'].strip() in own
    assert rows[other]['messages'][-1]['content'].strip() in kl
    labels.append(example.arrays['label'].sum() > 0)
  assert labels == [row['label'] for row in rows] and sum(labels) == 150


@pytest.mark.parametrize(
  'name, size', [('alpaca_en_demo.json', 999), ('glaive_toolcall_en_demo.json', 300), ('v1_sft_demo.jsonl', 500)]
)
def test_sft_examples_train_all_assistant_turns(shared_data, qwen_tokenizer, name, size):
  path = str(shared_data(f'sft/{name}'))
  rows = sources.read(path)
  assert len(rows) == size
  for n in range(size):
    example = chat.make_example(qwen_tokenizer, rows[n], rows.where(n))
    trained = qwen_tokenizer.decode(example.tokens[example.trained])
    turns = rows[n].get('messages') or rows[n]['completion']
    for m in turns:
      content = m['content'] or ''
      if not isinstance(content, str):
        content = ''.join(part['value'] for part in content)
      if m['role'] == 'assistant':
        assert content.strip() in trained
  if name == 'v1_sft_demo.jsonl':
    lazy = sources.read(path, streaming=True)
    assert list(lazy) == list(rows)


def test_math_map_reads_every_problem(shared_data):
  for name, size, dropped in (('math_train', 7470, 4), ('math500', 500, 0)):
    path = str(shared_data(f'math/{name}.json'))
    rows = sources.read(path, map_fn='jaxpost.data.maps:math')
    assert (len(rows), rows.dropped) == (size, dropped)
    (message,) = rows[0]['prompt']
    assert message['content'].endswith('in \\boxed{}.') and rows[0]['answer']
    assert ('completion' in rows[0]) == (name == 'math500')


def test_mixture_of_sft_files_has_the_shares_of_its_weights(shared_data, qwen_tokenizer):
  paths = [str(shared_data(f'sft/{name}')) for name in ('alpaca_en_demo.json', 'v1_sft_demo.jsonl')]
  rows = sources.read_sources(' + '.join(paths), weights=(1, 3))
  stream = loader.PackedStream(
    lambda i: chat.make_example(qwen_tokenizer, rows[i], rows.where(i)),
    len(rows),
    batch_size=4,
    row_length=1024,
    seed=0,
    window=256,
    sizes=rows.sizes,
    weights=rows.weights,
  )
  infos = [next(stream)[1] for _ in range(12)]
  stream.close()
  first, second = (sum(info[f'data/{n}/documents'] for info in infos) for n in (0, 1))
  assert second / (first + second) == pytest.approx(0.75, abs=0.06)
