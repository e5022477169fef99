"""Real trainers of TRL: their construction, state, ranks and loops."""
