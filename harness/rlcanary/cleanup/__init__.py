"""Find and end a test's leftovers: processes, Ray actors, engines, GPU memory, and the test that hangs.

torch, ray and vllm are never imported here; their state is looked at where the process itself has imported them.
"""
