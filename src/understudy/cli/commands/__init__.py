"""The commands of `understudy`: one module each, imported by `understudy.cli.app`."""
