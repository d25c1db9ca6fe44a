"""Trains with TRL, and measures the models of all libraries, in an environment that has trl and torch alone.

python rival_trl.py FOLDER sft|dpo|grpo SEED [same_end]   writes FOLDER/trl/METHOD/SEED
python rival_trl.py FOLDER measure                        prints a line for each library, method and seed

TRL trains on all that the chat template renders for an answer: for the template of FOLDER the end of the turn and
the line break after it. jaxpost trains up to the end of the turn, where sampling stops. With `same_end` the
template writes that line break before the next turn instead, so both train on the same tokens of the same
sequences; the results go to FOLDER/trl_same_end.
"""

import json
import pathlib
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

SETTINGS = json.loads(pathlib.Path(__file__).with_name('settings.json').read_text())


def rows(folder, name):
  return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text().splitlines()]


SAME_END = (
  "{%- for message in messages %}{{- ('' if loop.first else '\\n') + '<|im_start|>' + message.role + '\\n' + "
  "message.content + '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '\\n<|im_start|>assistant\\n' }}"
  '{%- endif %}'
)


def common(out, name, seed):
  given = SETTINGS[name]
  return dict(
    output_dir=str(out),
    seed=seed,
    max_steps=given['steps'],
    learning_rate=given['lr'],
    lr_scheduler_type='constant',
    adam_beta2=SETTINGS['b2'],
    weight_decay=0.0,
    max_grad_norm=1.0,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
    save_strategy='no',
    logging_steps=1,
    disable_tqdm=True,
  )


IN_ORDER = dict(train_sampling_strategy='sequential')


def right(completions, answer, **_):
  return [float(c[0]['content'].strip() == a) for c, a in zip(completions, answer)]


def make(folder, out, name, seed):
  given = SETTINGS[name]
  start = str(folder / given['start'] / 'export')
  model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
  tokenizer = AutoTokenizer.from_pretrained(start)
  if out.parts[-3] == 'trl_same_end':
    tokenizer.chat_template = SAME_END
  data = Dataset.from_list(rows(folder, f'{name}_{seed}'))
  parts = dict(model=model, processing_class=tokenizer)
  settings = common(out, name, seed)
  if name == 'sft':
    from trl import SFTConfig, SFTTrainer

    data = data.remove_columns('answer')
    args = SFTConfig(
      per_device_train_batch_size=given['batch'], completion_only_loss=True, max_length=64, **settings, **IN_ORDER
    )
    return SFTTrainer(args=args, train_dataset=data, **parts)
  if name == 'dpo':
    from trl import DPOConfig, DPOTrainer

    data = data.remove_columns('answer')
    args = DPOConfig(
      per_device_train_batch_size=given['batch'], beta=given['beta'], max_length=64, **settings, **IN_ORDER
    )
    return DPOTrainer(args=args, train_dataset=data, **parts)
  from trl import GRPOConfig, GRPOTrainer

  data = data.remove_columns('completion')
  args = GRPOConfig(
    per_device_train_batch_size=given['batch'] * given['group'],
    shuffle_dataset=False,
    num_generations=given['group'],
    max_completion_length=given['new'],
    beta=0.0,
    temperature=1.0,
    **settings,
  )
  return GRPOTrainer(reward_funcs=right, args=args, train_dataset=data, **parts)


def train(folder, out, name, seed):
  set_seed(seed)
  trainer = make(folder, out, name, seed)
  trainer.train()
  trainer.model.save_pretrained(out / 'export')
  trainer.processing_class.save_pretrained(out / 'export')
  (out / 'log.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in trainer.state.log_history))


def logprobs(model, tokenizer, pairs):
  """Returns the log-prob of each completion after its prompt, end of turn included, and its tokens."""
  found, out = [], []
  for prompt, completion in pairs:
    head = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    first = tokenizer(head, add_special_tokens=False)['input_ids']
    rest = tokenizer(completion[0]['content'] + tokenizer.eos_token, add_special_tokens=False)['input_ids']
    found.append((torch.tensor(first + rest), len(first)))
  ids = torch.nn.utils.rnn.pad_sequence([x for x, _ in found], batch_first=True)  # padded on the right
  with torch.no_grad():
    scores = model(ids).logits.log_softmax(-1)
  for row, (x, start) in enumerate(found):
    chosen = scores[row, start - 1 : len(x) - 1].gather(1, x[start:, None])
    out.append((float(chosen.sum()), len(x) - start))
  return out


def loss(model, tokenizer, folder, start):
  found = logprobs(model, tokenizer, [(r['prompt'], r['completion']) for r in rows(folder, 'sft_test')])
  return -sum(x for x, _ in found) / sum(n for _, n in found)


def accuracy(model, tokenizer, folder, start):
  """Returns rewards/accuracies and rewards/margins of the held-out pairs, with `start` as the reference."""
  pairs = rows(folder, 'dpo_test')
  margins = []
  for which in (model, start):
    sides = [logprobs(which, tokenizer, [(r['prompt'], r[side]) for r in pairs]) for side in ('chosen', 'rejected')]
    margins.append([a[0] - b[0] for a, b in zip(*sides)])
  gains = [new - old for new, old in zip(*margins)]
  return sum(gain > 0 for gain in gains) / len(pairs), SETTINGS['dpo']['beta'] * sum(gains) / len(pairs)


def pass_at_1(model, tokenizer, folder, start):
  set_seed(0)
  good = total = 0
  for row in rows(folder, 'grpo_test'):
    head = tokenizer.apply_chat_template(row['prompt'], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(head, add_special_tokens=False, return_tensors='pt')['input_ids']
    ids = ids.repeat(SETTINGS['samples'], 1)
    with torch.no_grad():
      made = model.generate(
        ids,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=SETTINGS['grpo']['new'],
        attention_mask=torch.ones_like(ids),
        pad_token_id=tokenizer.pad_token_id,
      )
    for text in tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True):
      good += text.strip() == row['answer']
      total += 1
  return good / total


METRICS = {'sft': loss, 'dpo': accuracy, 'grpo': pass_at_1}


def measure(folder):
  torch.set_num_threads(1)  # single rows: more threads wait for each other
  for name, metric in METRICS.items():
    at = folder / SETTINGS[name]['start'] / 'export'
    if not list(folder.glob(f'*/{name}/*/export')):  # not trained here
      continue
    start = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(at)
    found = [('start', '', at)]
    for library in ('jaxpost', 'trl', 'trl_same_end', 'tunix', 'tunix_same_end'):
      found += [(library, p.parent.name, p) for p in sorted(folder.glob(f'{library}/{name}/*/export'))]
    for library, seed, path in found:
      model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
      value = metric(model, tokenizer, folder, start)
      print(json.dumps(dict(method=name, library=library, seed=seed, value=value)), flush=True)


if __name__ == '__main__':
  where = pathlib.Path(sys.argv[1]).resolve()
  if sys.argv[2] == 'measure':
    measure(where)
  else:
    _, _, method, seed, *end = sys.argv
    train(where, where / '_'.join(['trl', *end]) / method / seed, method, int(seed))
