"""The adapter of NeMo RL."""
