"""One module per area of the conformance suite. New modules here are discovered automatically."""
