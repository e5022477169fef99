"""The plan of a training run, section by section."""
