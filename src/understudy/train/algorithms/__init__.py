"""Training algorithms: advantages, losses and policy updates (GRPO and its variants); SFT and DPO by TRL's
trainers.
"""
