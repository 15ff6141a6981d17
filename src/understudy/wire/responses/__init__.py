"""OpenAI Responses: what Codex CLI speaks."""
