import os

# Ray gives its workers niceness 15: beside busy tests they hardly run, and the limits of their own tests pass.
os.environ |= {"RAY_worker_niceness": "0"}

pytest_plugins = ["pytester"]
