"""Claude Code's session logs: from lines to the conversations that the model was sent."""
