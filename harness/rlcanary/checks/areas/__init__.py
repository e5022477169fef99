"""One module per area of the conformance suite. A new module here is found by itself."""
