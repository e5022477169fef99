"""The checks, one module per area in the folders. New modules here are discovered automatically."""
