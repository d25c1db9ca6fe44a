"""Rows to batches: files, chat templates, tokenizers, packing, streams.

The only room that imports grain (loader.py), transformers and tokenizers (tokenizer.py).
Imports storage/ and types; rl/, algorithms/ and stage/ import it. Never here: models,
devices, rewards.
"""
