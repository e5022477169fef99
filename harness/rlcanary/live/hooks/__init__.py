"""The audit in trainers that own their loop, one module each."""
