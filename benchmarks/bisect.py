"""Runs the benchmark of the bisect in bisection/: python benchmarks/bisect.py [--trials 500] [--json FILE] [--quick]"""

# To the scripts beside this one, `import bisect` means this file: let them have what they mean, the standard library's.
from _bisect import bisect_left, bisect_right, insort_left, insort_right

bisect, insort = bisect_right, insort_right
__all__ = ["bisect", "bisect_left", "bisect_right", "insort", "insort_left", "insort_right"]

if __name__ == "__main__":
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).with_name("bisection")), run_name="__main__")
