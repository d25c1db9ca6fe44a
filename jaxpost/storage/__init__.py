"""Storage: checkpoints, object stores (gs://, s3://), the hub, cached arrays, the lock of a run.

Import from here: `checkpoint.Checkpointer` (the only use of orbax), `manifest` (which steps of a run are finished),
`object_store` (local and remote paths and files, and one-line errors about them), `remote` (copies of remote folders),
`hub` (the only use of huggingface_hub), `array_cache` (arrays kept between runs), `run_lock` (one run in a folder at a
time) and `seals` (checksums of files).

Imports only `distributed` and below. It knows no models and no formats of data or weights; of a config it reads only
what `manifest.is_finished` needs.
"""
