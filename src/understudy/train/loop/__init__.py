"""The training loop: collect, grade, update, publish the weights, and again. Its state on disk survives kills."""
