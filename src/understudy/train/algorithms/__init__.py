"""How a model learns: advantages, losses, policy updates (GRPO and kin), imitation and preferences through TRL."""
