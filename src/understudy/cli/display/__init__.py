"""What a person sees: progress on stderr, tables, transcripts, and JSON on stdout."""
