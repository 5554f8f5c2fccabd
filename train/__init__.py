"""Training of a draft: data loading, optimisation, checkpoints, tracking."""
