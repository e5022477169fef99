"""`python tests/check_metrics.py run.json CHECK...`: how functional tests have always spelled `rlcanary check-metrics`."""

import sys

from rlcanary.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["check-metrics"]
    main()
