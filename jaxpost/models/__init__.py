"""Decoders as pure functions over nested dicts of arrays.

Lives here: the model config, the parameter table that drives initialization, sharding and conversion, attention,
experts, adapters, quantization. Imports distributed/ and below; programs/ and formats/ import it. Never here: file
formats, names of model families, training.
"""
