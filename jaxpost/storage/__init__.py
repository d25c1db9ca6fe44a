"""Storage: checkpoints, object stores (gs://, s3://), the hub, cached arrays, the lock of a run.

Import from here: `checkpoint.Checkpointer` (the only use of orbax), `manifest` (which
steps of a run are finished), `object_store` (paths and whole files, local or remote, and what
errors of the system about them mean), `remote` (copies of remote
folders), `hub` (the only use of huggingface_hub), `array_cache` (arrays kept between
runs), `run_lock` (one run in a folder at a time) and `seals` (checksums of files).

Imports only `distributed` and below. What is stored is not known here: no models, no
configs, no formats of data or weights.
"""
