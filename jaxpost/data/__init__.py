"""Data: files and hubs -> rows -> tokens with a loss mask -> packed batches."""
