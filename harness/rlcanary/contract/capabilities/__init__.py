"""The capabilities of an adapter, in groups: a class and a module each."""
