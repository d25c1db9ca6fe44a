"""Formats: model weights and configs as Hugging Face, vLLM and `peft` read and write them.

Import from here: `hf` (reads model folders: config, weights), `hf_export` (writes them), `peft` (adapter folders),
`config_json` and `config_export` (config.json -> ModelConfig and back) and `families` (the table of supported model
families; a new one is an entry there). The other modules are their parts: `tensor_layout` (maps a parameter to the
tensors of a folder), `safetensors_file` (reads parts of a file), `fp8` and `mxfp4` (weights of 8 and 4 bits). Only
peft.py imports safetensors.

Imports `models`, `storage`, `distributed` and below. How a model computes belongs in
`models`; which folder a run reads is decided in `stage`.
"""
