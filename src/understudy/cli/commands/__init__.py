"""The commands of `understudy`, one module each. `understudy.cli.app` imports them when they are called."""
