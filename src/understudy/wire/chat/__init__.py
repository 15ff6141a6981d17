"""OpenAI chat completions: what OpenCode, mini-swe-agent and most other agents speak."""
