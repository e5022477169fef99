"""The files with which a repository starts to use rlcanary: what is there, and what to write."""
