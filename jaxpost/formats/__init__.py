"""Model folders in and out: Hugging Face, PEFT, safetensors, MXFP4.

Lives here: model families as data and the translation of config.json. The only room that
imports safetensors. Imports models/, storage/ and below; stage/ and tools/ import it. Never
here: mathematics of a layer.
"""
