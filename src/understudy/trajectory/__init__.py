"""An attempt's calls as one tree with branches, and the token sequences to train on."""
