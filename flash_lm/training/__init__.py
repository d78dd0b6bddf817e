"""The sharded training loop: state, step, optimizer, checkpoints, evaluation, metrics and the clock."""
