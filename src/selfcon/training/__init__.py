"""The training loop and what it stands on: schedule, optimisers, checkpoints, the run folder."""
