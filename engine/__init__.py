"""What the scripts share: optimizer, checkpoints, evaluation, generation, tracking, devices."""
