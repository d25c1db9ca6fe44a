"""Serves a checkpoint of a run, or a model folder, as OpenAI's API does.

  python -m launch.serve --model=FOLDER --port=8000
  python -m launch.serve --run=runs/quickstart --record=asked.jsonl
  python -m launch.serve --model=BASE --adapter=sft=DIR --adapter=dpo=DIR

/v1/chat/completions and /v1/completions on loopback, until Ctrl-C. Answers
have `token_ids` and `prompt_token_ids` beside OpenAI's fields; --record keeps
a row of ids and log-probs of each. Requests share the slots. Prints its URL.
Adapters have slots of their own and the base in common; `model` names one.
"""

import json
import logging
import signal

from absl import flags

from jaxpost.hardware import host

_RUN = flags.DEFINE_string('run', '', 'Folder of a run.')
_STEP = flags.DEFINE_integer('step', None, 'Default: the newest checkpoint.')
_STAGE = flags.DEFINE_string('stage', '', 'Default: the last with any.')
_MODEL = flags.DEFINE_string('model', '', 'Hugging Face folder or org/name.')
_ADAPTER = flags.DEFINE_multi_string('adapter', [], 'NAME=FOLDER of peft.')
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Who else may ask: 0.0.0.0.')
_PORT = flags.DEFINE_integer('port', 8000, '0: any.', lower_bound=0)
_SLOTS = flags.DEFINE_integer('slots', 8, 'Answers at a time.', lower_bound=1)
_CONTEXT = flags.DEFINE_integer('max_context', 4096, 'Tokens of a prompt and its answer.', lower_bound=2)
_RECORD = flags.DEFINE_string('record', '', 'File of what was asked, .jsonl.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.', lower_bound=0)
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'As config.mesh.rollout.')


def main(argv):
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  from jaxpost.environments.openai_server import Endpoint
  from jaxpost.stage import assemble
  from jaxpost.tools import completions, inference

  weights = inference.load(_RUN.value, _MODEL.value, _STAGE.value, _STEP.value)
  half, name = _CONTEXT.value // 2, _RUN.value or _MODEL.value
  engines = completions.make_engines(
    weights,
    name,
    _ADAPTER.value,
    slots=_SLOTS.value,
    max_prompt=_CONTEXT.value - half,
    max_new_tokens=half,
    mesh=_MESH.value,
    top_logprobs=min(20, weights.prepared.model.config.vocab_size),
  )

  def record(entry):
    if _RECORD.value:
      with open(_RECORD.value, 'a', encoding='utf-8') as file:
        file.write(json.dumps(entry) + '\n')

  endpoint = Endpoint(
    engines.pop(name),
    weights.prepared.tokenizer,
    host=_HOST.value,
    port=_PORT.value,
    name=name,
    record=record,
    more=engines,
  )
  for sign in signal.SIGINT, signal.SIGTERM:
    signal.signal(sign, lambda *_: endpoint.stop())
  print(endpoint.url, flush=True)
  endpoint.serve(assemble.run_key(_SEED.value, 3))


if __name__ == '__main__':
  from . import exits

  exits.run(main)
