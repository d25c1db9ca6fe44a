"""Serves a checkpoint of a run, or a model folder, with OpenAI's HTTP API.

  python -m launch.serve --model=FOLDER --port=8000
  python -m launch.serve --run=runs/quickstart --record=requests.jsonl
  python -m launch.serve --model=BASE --adapter=sft=DIR --adapter=dpo=DIR

Answers /v1/chat/completions and /v1/completions (`echo` with `logprobs`: log-probs of prompts) until Ctrl-C.
The first answers wait for compilation, once for each power of two of tokens. Responses have `token_ids` and
`prompt_token_ids`, too; --record appends the token ids and log-probs of each to a file. Requests share the decoding
slots; a client that disconnects gives up its own. Adapters share the base but have their own slots; `model` in a
request names one. Prints the URL, a curl command, and at the end the requests answered, refused and cancelled.
"""

import logging
import signal

from absl import flags

from jaxpost.hardware import host

from . import exits, model_flags

_WEIGHTS = model_flags.define()
_ADAPTER = flags.DEFINE_multi_string('adapter', [], 'PEFT adapter as NAME=FOLDER')
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0: reachable from other machines.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port to listen on; 0: any free port.', lower_bound=0, upper_bound=65_535)
_KEY = flags.DEFINE_string('api_key_file', '', 'File with the API key that clients must send; "": none is asked for.')
_SLOTS = flags.DEFINE_integer('slots', 8, 'Sequences decoded at the same time.', lower_bound=1)
_CONTEXT = flags.DEFINE_integer('max_context', None, 'Tokens of a chat; 4,096 if the model has them.', lower_bound=2)
_RECORD = flags.DEFINE_string('record', '', 'File to which requests and completions are appended, .jsonl.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of sampling.', lower_bound=0)
_MESH = flags.DEFINE_string('mesh', 'data=-1', 'Device mesh, written as config.mesh.rollout.')


def main(argv):
  """Serves until SIGINT or SIGTERM."""
  del argv
  logging.getLogger().setLevel(logging.WARNING)
  host.tune_host()
  host.use_compile_cache()
  from jaxpost.environments import http_connections, openai_server
  from jaxpost.stage import model_limits, on_policy
  from jaxpost.tools import completions, inference, scoring, server_files

  key, record = server_files.read_key(_KEY.value), server_files.recorder(_RECORD.value)
  weights = inference.load(**_WEIGHTS.arguments())
  name = server_files.public_name(_WEIGHTS.name)
  context = _CONTEXT.value or min(4096, model_limits.longest(weights.inputs.model.config))
  models = completions.share_base(weights, name, _ADAPTER.value, _MESH.value)
  top = min(20, weights.inputs.model.config.vocab_size)
  engines = completions.make_engines(
    models,
    slots=_SLOTS.value,
    max_prompt=context - context // 2,
    max_new_tokens=context // 2,
    mesh=_MESH.value,
    top_logprobs=top,
  )
  http_connections.raise_file_limit()
  endpoint = openai_server.Endpoint(
    engines.pop(name),
    weights.inputs.tokenizer,
    host=_HOST.value,
    port=_PORT.value,
    name=name,
    record=record,
    api_key=key,
    other_engines=engines,
    scorers={name: scoring.Scorer(model, top, context) for name, model in models.items()},
  )
  for sign in signal.SIGINT, signal.SIGTERM:
    signal.signal(sign, lambda *_: endpoint.stop())
  print(endpoint.url, flush=True)
  inference.to_stderr(server_files.example(endpoint.url, name, _KEY.value, weights.inputs.tokenizer))
  endpoint.serve(on_policy.run_key(_SEED.value, 3))
  print('requests', ', '.join(f'{outcome}: {count}' for outcome, count in endpoint.counts.items()))


if __name__ == '__main__':
  exits.run(main)
