"""The tiny model that comes with the package: its tokenizer, what it is trained on, the command that makes it."""
