"""Training: turns samples of graded rollouts into a better policy. Only this package and `model` import torch."""
