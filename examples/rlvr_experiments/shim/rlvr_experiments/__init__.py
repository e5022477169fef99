"""The names of rlvr-experiments that its unit tests call, on the bundled trainer: arguments and records are translated."""
