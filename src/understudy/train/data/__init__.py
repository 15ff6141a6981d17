"""What is learned from: groups of rollouts out of stores and exports, as tokens of the model that is trained."""
