"""Anthropic Messages: what Claude Code speaks."""
