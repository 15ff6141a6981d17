"""Training: samples of graded rollouts become a better policy. torch is imported here and in `model` only."""
