"""Data: files, hub data sets and generators -> rows -> tokens with a loss mask -> batches.

In the order of use: `sources` (rows of a file, folder or data set, with `source_files`, `files`, `lazy`, `generated`
and `maps`), `chat` and `preferences` (a row -> an `Example` of `examples`), `packing` (Examples -> a Batch), `loader`
(streams of batches), `prompts` (streams of prompts for samplers), `tokenizer` and `preview`. Only loader.py imports
grain, and only tokenizer.py imports transformers and tokenizers.

Imports `storage`, `imports`, `types` and below. Has no models, no losses and nothing that is specific to an algorithm,
whose `render` makes examples of rows.
"""
