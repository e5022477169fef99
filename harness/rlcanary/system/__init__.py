"""git, processes, files and the one append-only journal."""
