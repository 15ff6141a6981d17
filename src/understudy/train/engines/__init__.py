"""Other projects' trainers that can train on our samples, one module each: LLaMA-Factory, TRL, verl."""
