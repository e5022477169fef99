"""Record, in every process of a test run, the project code that each test ran. Needs the standard library only.

The same files serve the pytest process, where they are part of rlcanary, and processes whose environment has no rlcanary:
those find them on PYTHONPATH, or receive them compiled together with the first Ray function that they load.
"""
