"""The command line: one file a command group. Heavy modules are imported when a command runs."""
