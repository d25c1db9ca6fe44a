"""SFT on GSM8K: an instruct model learns the worked answers, '#### 42' last.

python -m launch.train --config=configs/sft_gsm8k.py --workdir=runs/sft_gsm8k

Meant for one accelerator of 80 GB; time and accuracy have not been measured yet. The
metric is pass@1 of the greedy answers to test questions (split `eval`);
docs/defaults.md has what others report: MaxText 0.81 for GRPO of Qwen3-1.7B, verl 0.52 for SFT of gemma-2-2b.
`:model=NAME` takes a name below, a hub id or a folder; data of your own:
--config.data.path=FILE with question and answer, or prompt and completion.
`:lora=16` trains adapters of that rank (docs/lora.md).
`:runlocal` needs no network: a tiny random model learns generated sums, and the held-out loss goes from 5.70 to 1.45
in 30 steps.
"""

import ml_collections

from jaxpost import defaults, parse_arg

MODELS = {
  'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
  'qwen3_1_7b': 'Qwen/Qwen3-1.7B',
  'llama3_2_1b': 'meta-llama/Llama-3.2-1B-Instruct',
  'qwen2_5_0_5b': 'Qwen/Qwen2.5-0.5B-Instruct',
}
DATA = 'openai/gsm8k:main/{}-00000-of-00001.parquet'


def get_config(arg=None):
  arg = parse_arg(arg, model='qwen3_0_6b', lora=0, runlocal=False)
  config = ml_collections.ConfigDict(defaults())
  config.algorithm = 'sft'
  config.model.path = MODELS.get(arg.model, arg.model)
  config.data.path = DATA.format('train')
  config.data.map = 'jaxpost.data.maps:gsm8k'
  config.reward = 'gsm8k'
  config.train.update(steps=400, batch_size=16, row_length=1024)
  config.optim.update(schedule='cosine', warmup_steps=20)
  config.rollout.update(max_prompt_length=320, max_new_tokens=512)
  config.eval.data.path = DATA.format('test')
  config.eval.update(every=100, samples=1, temperature=0.0)
  config.save.every = 100
  if arg.lora:
    config.lora.update(rank=arg.lora, alpha=2.0 * arg.lora)
    config.model.param_dtype = 'bfloat16'  # of the base; adapters are float32

  if arg.runlocal:
    made = 'generated:arithmetic:max=9,correct=1,split='
    config.model.update(path='', preset='tiny', tokenizer='bytes')
    config.data.path = made + 'train'
    config.eval.data.path = made + 'test'
    config.train.update(batch_size=4, row_length=256)
    config.train.steps = 30
    config.optim.update(lr=3e-3, warmup_steps=4)
    config.rollout.update(max_prompt_length=48, max_new_tokens=8, prompts=8)
    config.eval.update(every=0, size=64)
    config.save.every = 0
  return config
