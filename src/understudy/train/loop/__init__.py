"""The training loop: collect, grade, update, publish the weights, collect again; it survives kills."""
