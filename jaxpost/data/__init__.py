"""Data: files, hub data sets and generators -> rows -> tokens with a loss mask -> batches.

In the order of use: `sources` (rows of a file, folder or data set; `source_files`,
`files`, `lazy`, `generated` and `maps` serve it), `chat` and `preferences` (a row -> an `Example` of
`examples`), `packing` (Examples -> a Batch), `loader` (streams of batches), `prompts`
(streams of prompts for samplers), `tokenizer` and `preview`. Only loader.py imports grain,
only tokenizer.py transformers and tokenizers.

Imports `storage`, `imports`, `types` and below. No models, no losses, nothing of one
algorithm: which rows an algorithm trains on is its own `render`.
"""
