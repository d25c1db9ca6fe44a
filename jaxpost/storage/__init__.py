"""Checkpoints, object stores, the Hugging Face hub, arrays cached on disk.

The only room that imports orbax (checkpoint.py) and huggingface_hub (hub.py). Imports
distributed/ and `errors`; everything above may import it. Never here: what a checkpoint
means to a stage.
"""
