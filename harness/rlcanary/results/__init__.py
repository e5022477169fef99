"""What a test run measured: recorded as it happens, kept as JSON files, read back as history.

The way of a value: `tracker` encodes it (`encoding`) and appends it to a journal (`journal`); at the end of the run,
or at the start of the next one if this one was killed, `recorder` merges the journals into the results file
(`store`); `history` reads the files of all runs, `changepoints` finds where a metric moved, `trends` draws it and
`command` is `rlcanary trend`.

Nothing here imports torch, ray or vllm.
"""
