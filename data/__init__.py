"""From text to tokens on disk, and from tokens on disk to batches."""
