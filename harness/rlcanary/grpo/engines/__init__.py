"""Sampling engines: transformers and vLLM, in this process or in Ray actors."""
