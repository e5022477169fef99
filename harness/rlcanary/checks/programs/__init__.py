"""The program that a failed check prints, with rlcanary or without."""
