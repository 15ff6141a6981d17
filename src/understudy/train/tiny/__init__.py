"""The tiny model that comes with the package: its tokenizer, its training data, and the command that trains it."""
