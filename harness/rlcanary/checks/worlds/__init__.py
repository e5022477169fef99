"""The inputs, models, states and engines that checks run in."""
