"""Training recognisers: speech as data, error rates, and the trainer."""
