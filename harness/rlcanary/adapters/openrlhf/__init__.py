"""The adapter of OpenRLHF."""
